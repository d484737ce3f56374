"""One rank of the job that faults strike: does what the driver asks for, and answers."""

from __future__ import annotations

import datetime
import json
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nereus_plugins.gtg.execute import (
    RankTransition,
    ReleaseFailed,
    TransitionAborted,
    TransitionOptions,
    TransitionUnrecoverable,
)
from nereus_plugins.gtg.faults import ENVIRONMENT_VARIABLE
from nereus_plugins.selftest.cases import Case
from nereus_plugins.selftest.compare import whole_state
from nereus_plugins.selftest.proofs import STAGING_BYTES, UNIT, make_job, staging_budget
from nereus_plugins.selftest.ranks import Bench, end_now, end_with_parent, prepare_process
from nereus_plugins.selftest.snapshots import group_of_all, state_digest
from nereus_plugins.snapshot import folder
from nereus_plugins.snapshot.restore import restore
from nereus_plugins.snapshot.snapshots import SnapshotOptions, Snapshots
from nereus_plugins.spec import Layout
from nereus_plugins.transport.control import Control
from tests.faults.scenario import STEP_TIMEOUT_S, TIMEOUT_S


def main(rank: int, world: int, port: int, pipe: Connection, case: Case, layout: Layout) -> None:
    """Args: port: of the store. case: its model. layout: to begin in."""
    end_with_parent()
    prepare_process("cpu")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port, None, False),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=STEP_TIMEOUT_S),
    )
    bench = Bench(rank, world, torch.device("cpu"), Path(), TIMEOUT_S)
    it = _Rank(bench, case, layout)
    pipe.send_bytes(b'{"value": null}')
    while True:
        try:
            command, arguments = json.loads(pipe.recv_bytes())
        except EOFError:
            break
        pipe.send_bytes(json.dumps(it.answer(command, arguments)).encode())
    end_now()


class _Rank:
    def __init__(self, bench: Bench, case: Case, layout: Layout) -> None:
        self._bench = bench
        self._case = case
        self._job: Any = make_job(case, layout, bench, seed=1)
        self._control = Control(bench.rank, bench.world, timeout_s=bench.timeout_s)
        self._transition: RankTransition | None = None
        self._budget: Any = None

    def answer(self, command: str, arguments: list[Any]) -> dict[str, Any]:
        try:
            return {"value": getattr(self, command)(*arguments)}
        except TransitionAborted as error:
            return {"failed": "aborted", "lost": error.lost_ranks, "said": str(error)}
        except ReleaseFailed as error:
            return {"failed": "release", "said": str(error)}
        except TransitionUnrecoverable as error:
            return {"failed": "unrecoverable", "said": str(error)}
        except Exception as error:
            return {"failed": "raised", "said": f"{type(error).__name__}: {error}"}

    # -- commands ---------------------------------------------------------------------------------

    def arm(self, fault: str) -> None:
        os.environ[ENVIRONMENT_VARIABLE] = fault

    def train(self, step: int) -> float | None:
        loss: float | None = self._job.train_step(step)
        return loss

    def limit(self, target: dict[str, Any]) -> None:
        """Have memory for the old layout or the target, not for both; collective."""
        self._budget = staging_budget(self._job, Layout.from_dict(target), self._bench)

    def prepare(self, target: dict[str, Any], epoch: int) -> str:
        """Returns: "intact" or "staged"."""
        layout, bench, budget = Layout.from_dict(target), self._bench, self._budget
        self._transition = RankTransition(
            {UNIT: self._job},
            rank=bench.rank,
            world=bench.world,
            control=self._control,
            options=TransitionOptions(
                timeout_s=bench.timeout_s,
                memory_budget_bytes=budget.nbytes if budget else None,
                staging_bytes=STAGING_BYTES if budget else None,
            ),
        )
        predicted = {UNIT: budget.target} if budget else None
        return self._transition.prepare({UNIT: layout}, epoch, predicted).mode

    def commit(self) -> None:
        assert self._transition is not None
        self._transition.commit()

    def release(self) -> None:
        assert self._transition is not None
        self._transition.release()

    def abort(self) -> list[int]:
        """Returns: ranks that are lost."""
        assert self._transition is not None
        return list(self._transition.abort())

    def layout(self) -> dict[str, Any]:
        return self._job.layout().to_dict()

    def digest(self) -> str:
        """Of the whole state of the unit, bits and scalars; collective."""
        return state_digest(whole_state(self._job.described(), self._bench.device))

    def save(self, place: str, step: int) -> None:
        """A snapshot on disk; collective."""
        snapshots = Snapshots(SnapshotOptions(Path(place)), group_of_all())
        assert snapshots.take(step, {UNIT: self._job})
        taken = snapshots.wait()
        snapshots.close()
        assert taken is not None
        assert not taken.error, taken.error

    def load(self, place: str) -> int:
        """Restore the last snapshot; the step after which it was taken. Collective."""
        snapshot, group = folder.latest(Path(place)), group_of_all()
        restore(snapshot, {UNIT: self._job.current}, group)
        dist.destroy_process_group(group)
        return snapshot.index.step
