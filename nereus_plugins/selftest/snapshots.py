"""Proofs about snapshots: what was taken while a job trained on is restored bit by bit, into every
layout that fits on these ranks, and by a job of another number of ranks."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nereus_plugins.selftest.cases import Case, cases
from nereus_plugins.selftest.compare import State, differences, whole_state
from nereus_plugins.selftest.proofs import UNIT, Check, Notebook, make_job
from nereus_plugins.selftest.ranks import Bench, Ended, run_on_ranks
from nereus_plugins.snapshot import folder
from nereus_plugins.snapshot.restore import restore
from nereus_plugins.snapshot.snapshots import SnapshotOptions, Snapshots, Taken
from nereus_plugins.spec import Layout
from nereus_plugins.transport.control import Control

STEPS = 2  # before the snapshot
# One that has pairs of layouts of as many ranks as each of them.
_MODEL: dict[str, dict[str, Any]] = {
    "megatron": {"bf16": True},
    "fsdp2": {},
    "deepspeed": {"bf16": True},
}
SMALL, LARGE = 2, 4  # ranks of jobs that restore each other's snapshots


def restored(bench: Bench, backend: str, quick: bool) -> list[dict[str, Any]]:
    """On a rank: a snapshot of each model's first layout, restored into each layout of any."""
    control = Control(bench.rank, bench.world, timeout_s=bench.timeout_s)
    notes = Notebook(bench, control)
    known = cases(backend, bench.world)
    layouts = list(dict.fromkeys(one for c in known for one in (c.source, c.target)))
    sources = list({str(c.model): c for c in reversed(known)}.values())
    for case in sources[:1] if quick else sources:
        _one_source(case, layouts, bench, notes)
    return notes.dump()


def _one_source(case: Case, layouts: list[Layout], bench: Bench, notes: Notebook) -> None:
    root = bench.folder / f"{case.backend}-{'-'.join(case.model)}"
    job = make_job(case, case.source, bench, seed=1)
    wanted, taken = _train_and_take(job, bench, root)
    model = str(case).split(":")[0]
    where = f"{model}: {case.source}"
    notes.note("snapshot taken while training", where, [taken.error] if taken.error else [])
    job.close()
    for layout in layouts:
        target = make_job(case, layout, bench, seed=5)
        group = group_of_all()
        restore(folder.latest(root), {UNIT: target.current}, group)
        wrong = differences(wanted, whole_state(target.described(), bench.device))
        notes.note("snapshot restored", f"{where} -> {layout}", wrong)
        target.close()
        dist.destroy_process_group(group)


def _train_and_take(job: Any, bench: Bench, root: Path) -> tuple[State, Taken]:
    """The state after `STEPS`, of which a snapshot is taken while the job trains on."""
    for step in range(STEPS):
        job.train_step(step)
    wanted = whole_state(job.described(), bench.device)
    snapshots = Snapshots(SnapshotOptions(folder=root), group_of_all())
    snapshots.take(STEPS, {UNIT: job})
    job.train_step(STEPS)
    taken = snapshots.wait()
    snapshots.close()
    assert taken is not None
    return wanted, taken


def saved(bench: Bench, backend: str, root: str) -> str:
    """On a rank: a job that takes a snapshot; a digest of the state it was of."""
    case = _fitting(backend, bench.world)
    job = make_job(case, case.source, bench, seed=1)
    wanted, taken = _train_and_take(job, bench, Path(root))
    if taken.error:
        raise RuntimeError(taken.error)
    return state_digest(wanted)


def loaded(bench: Bench, backend: str, root: str) -> str:
    """On a rank: a new job, of any number of ranks, that restores; a digest of its state."""
    case = _fitting(backend, bench.world)
    job = make_job(case, case.target, bench, seed=5)
    restore(folder.latest(Path(root)), {UNIT: job.current}, group_of_all())
    found = state_digest(whole_state(job.described(), bench.device))
    job.train_step(STEPS)
    return found


def run_restarted(backend: str, *, device: str, limit_s: float) -> list[Check]:
    """Jobs of few ranks and of many that restore each other's snapshots, in processes anew."""
    checks = []
    for first, second in ((SMALL, LARGE), (LARGE, SMALL)):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="nereus-selftest-") as place:
            ended = {
                name: run_on_ranks(
                    f"{__name__}:{name}", ranks, backend, str(Path(place) / "snapshots"),
                    device=device, folder=Path(place), limit_s=limit_s,
                )
                for name, ranks in (("saved", first), ("loaded", second))
            }  # fmt: skip
        wrong = [_said(end) for ends in ended.values() for end in ends if end.value is None]
        if not wrong and ended["saved"][0].value != ended["loaded"][0].value:
            wrong = ["the restored state differs from the one saved"]
        subject = f"{backend}: {first} ranks -> {second} ranks"
        seconds = time.perf_counter() - begin
        checks.append(
            Check("snapshot restored by another job", subject, not wrong, seconds, "; ".join(wrong))
        )
    return checks


def group_of_all() -> dist.ProcessGroup:
    """A new gloo group of all ranks. Collective."""
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _fitting(backend: str, ranks: int) -> Case:
    """A pair of layouts of the same model whatever the number of ranks."""
    return next(c for c in cases(backend, ranks, at_least=ranks) if c.model == _MODEL[backend])


def _said(end: Ended) -> str:
    return end.error or f"rank {end.rank} ended with {end.exitcode}"


def state_digest(state: State) -> str:
    """64 hexadecimal digits; equal for equal bits and scalars."""
    tensors, scalars = state
    found = hashlib.sha256(json.dumps(scalars, sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()
