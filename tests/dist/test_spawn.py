"""The helper that other tests stand on: values, failures and hangs are told apart."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .spawn import RankFailed, run_ranks, run_ranks_outcomes


def _sum(rank: int, world: int, base: int) -> int:
    value = torch.tensor(base + rank)
    dist.all_reduce(value)
    return int(value)


def _misbehave(rank: int, world: int, kind: str) -> int:
    if rank == 1:
        if kind == "raise":
            raise ValueError("this rank is broken")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    return rank


def test_values_come_back_by_rank() -> None:
    assert run_ranks(_sum, 3, 10, timeout_s=60) == [33, 33, 33]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "this rank is broken"),
        ("kill", "exit -9"),
        ("hang", r"(?s)limit.*rank 1:.* in _misbehave\n"),
    ],
)
def test_failures_are_named(kind: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_ranks(_misbehave, 2, kind, timeout_s=6 if kind == "hang" else 60)


def test_outcomes_do_not_raise() -> None:
    outcomes = run_ranks_outcomes(_misbehave, 3, "kill", timeout_s=60)
    assert [o.value for o in outcomes] == [0, None, 2]
    assert [o.exitcode for o in outcomes] == [0, -9, 0]


_KEPT: list[Any] = []


def _with_a_child(rank: int, world: int) -> int:
    """As Megatron-core's checkpoints do: a manager that nobody shuts down."""
    _KEPT.append(multiprocessing.get_context("spawn").Manager())
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    return child.pid


def test_a_rank_leaves_no_process_behind() -> None:
    for pid in run_ranks(_with_a_child, 2, timeout_s=60):
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(f"/proc/{pid}").exists()


def sleep_after_naming_itself(bench: Any, folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    """Those of a selftest, whose parent is killed in a way that it cannot see."""
    code = f"""
from pathlib import Path
from nereus_plugins.selftest.ranks import run_on_ranks
if __name__ == "__main__":
    function = "tests.dist.test_spawn:sleep_after_naming_itself"
    folder = {str(tmp_path / "ranks")!r}
    run_on_ranks(function, 2, folder, device="cpu", folder=Path(folder), limit_s=600)
"""
    (tmp_path / "ranks").mkdir()
    script = tmp_path / "parent.py"  # the ranks' server imports it
    script.write_text(code)
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": path})
    try:
        ranks = _wait_for(lambda: _two([int(p.name) for p in (tmp_path / "ranks").iterdir()]))
    finally:
        parent.kill()
        parent.wait()
    _wait_for(lambda: not any(_runs(rank) for rank in ranks))


def _two(found: list[int]) -> list[int]:
    return found if len(found) == 2 else []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for(condition: Any, limit_s: float = 120.0) -> Any:
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.1)
    return found
