"""Twenty transitions of mixed kinds in one job, commanded from outside: nothing is left of them.

Layouts, knobs, ranks, a rank replaced, attempts that are given up. Every few of them the job is
back in the layout that it started in, and then it holds what it held there before.
"""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.cli import main
from nereus_plugins.control.cli import DONE, NOT_COMMITTED
from nereus_plugins.control.messages import ENDPOINT_FILE
from nereus_plugins.gtg.faults import ENVIRONMENT_VARIABLE
from nereus_plugins.trace.record import TransitionRecord, read_records
from tests.e2e import leaks, observe
from tests.e2e.jobs import TIMEOUT_S, small_job

COMMITTED, ABORTED = "committed", "aborted"
OFF = {"recompute": "none", "offload_optimizer": False}
BUDGETS = {"actor": {"token_budget_tokens": 160}, "critic": {"token_budget_tokens": 400}}
SIZES = {"actor": {"micro_batch": 2}, "critic": {"token_budget_tokens": 32768}}
KNOBS = {"actor": {"recompute": "full"}, "critic": {"offload_optimizer": True}}


def _home(**units: dict[str, Any]) -> dict[str, Any]:
    """A plan for the layout and knobs that the job started with."""
    named = {name: {"ulysses": 1, **OFF, **units.get(name, {})} for name in ("actor", "critic")}
    return {"ranks": 2, **named, "ref": {"ulysses": 1}}


PLANS: list[tuple[dict[str, Any], str]] = [
    ({"shard_size": 1}, COMMITTED),
    ({"ulysses": 2}, COMMITTED),
    (KNOBS, COMMITTED),
    (_home(), COMMITTED),
    ({"ranks": 4}, COMMITTED),
    ({"ranks": 2, "ulysses": 2}, ABORTED),
    ({"ranks": 1}, COMMITTED),
    (_home(), COMMITTED),
    ({"leave": [1]}, COMMITTED),
    ({"critic": {"ulysses": 2}}, COMMITTED),
    ({"actor": {"shard_size": 1}}, ABORTED),
    (_home(), COMMITTED),
    ({"ranks": 4, "actor": {"shard_size": 2, "ulysses": 2}}, COMMITTED),
    (BUDGETS, COMMITTED),
    ({"ranks": 2, "actor": {"ulysses": 2}}, COMMITTED),
    (_home(**SIZES), COMMITTED),
    ({"ranks": 8}, ABORTED),
    ({"ranks": 1}, COMMITTED),
    ({"ranks": 2, "ulysses": 2, "recompute": "full"}, COMMITTED),
    (_home(), COMMITTED),
]
# By the attempt that they break; the third that is given up asks for more ranks than there are.
FAULTS = "step=move,rank=1,kind=raise,epoch=6;step=verify,rank=0,kind=corrupt,epoch=11"
HOMES = (4, 8, 12, 16, 20)
STEPS = 24
# What may come between the second return and the last. Measured: of each nothing but memory; of
# rank 0 111 MiB in one run, 8 MiB of it in the last round, 3 MiB in another; of the driver 6 and 3.
ALLOWED = {
    "driver": {"descriptors": 4, "threads": 4, "process_groups": 0, "rss_bytes": 64 << 20},
    "rank 0": {"descriptors": 4, "threads": 4, "process_groups": 0, "rss_bytes": 192 << 20},
}


@pytest.mark.full
def test_twenty_transitions_of_mixed_kinds_leave_nothing(tmp_path: Path) -> None:
    micro = "micro_batch_size_per_gpu=2"
    arl = "actor_rollout_ref"
    job = small_job(
        tmp_path / "task",
        "fsdp2",
        2,
        reference=True,
        steps=STEPS,
        nereus={"claim_timeout_s": 5.0, "timeout_s": 60.0},
        extra=[
            "++ray_kwargs.ray_init.num_gpus=4",
            f"{arl}.rollout.tensor_model_parallel_size=1",
            f"{arl}.actor.ppo_{micro}",
            f"{arl}.rollout.log_prob_{micro}",
            f"{arl}.ref.log_prob_{micro}",
        ],
    )
    run_dir = tmp_path / "job" / "checkpoints" / "nereus"
    env = observe.environment(tmp_path / "observed") | leaks.environment(tmp_path / "held")
    env["VERL_USE_EXTERNAL_MODULES"] = f"{observe.__name__},{leaks.__name__}"
    env[ENVIRONMENT_VARIABLE] = FAULTS
    results: list[launch.JobResult] = []

    def run() -> None:
        results.append(launch.run(job, tmp_path / "job", timeout_s=2 * TIMEOUT_S, env=env))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        outcomes = [_submit(run_dir, plan, thread) for plan, _ in PLANS]
    finally:
        thread.join()
    (result,) = results
    result.require_success()
    assert outcomes == [outcome for _, outcome in PLANS]
    transitions = [r for r in read_records(run_dir) if isinstance(r, TransitionRecord)]
    assert [t.outcome for t in transitions] == outcomes

    seen = observe.read(tmp_path / "observed")
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert before["units"] == after["units"]
    held = leaks.read(tmp_path / "held")
    assert len(held) == len(transitions)
    homes = [held[number - 1] for number in HOMES]
    actors = [sorted(map(_kind, seen[2 * number - 1]["actors"])) for number in HOMES]
    assert actors == [actors[0]] * len(HOMES)
    # The rank that was replaced left a seat in the placement group of the job's start, of which Ray
    # takes no part back; it is taken again by a rank that joins.
    for name, spare in (("groups", 1), ("bundles", -1)):
        had = [seen[2 * number - 1][name] for number in HOMES]
        assert had[0] == had[-1]
        assert set(had) <= {had[0], had[0] + spare}, (name, had)
    for kind in ("processes", "files", "shared_memory"):
        assert [home[kind] for home in homes] == [homes[0][kind]] * len(HOMES), kind
    # From the second return on, when everything has happened once.
    settled = homes[1:]
    for who, allowed in ALLOWED.items():
        ours = [home[who] for home in settled]
        assert len({one["pid"] for one in ours}) == 1
        for kind, most in allowed.items():
            values = [one[kind] for one in ours]
            assert max(values) - values[0] <= most, (who, kind, values)
            # Not with every round.
            assert values[-1] - values[-2] <= most // 4, (who, kind, values)


def _kind(actor: str) -> str:
    """An actor's name without the number that each process has once."""
    return re.sub(r"WorkerDict_\d+:\d+", "WorkerDict", actor)


def _submit(run_dir: Path, plan: dict[str, Any], job: threading.Thread) -> str:
    """`nereus transition`: have the job run `plan` at its next boundary; how it ended."""
    file = run_dir.parent.parent.parent / "plan.yaml"
    file.write_text(json.dumps(plan))
    while not (run_dir / ENDPOINT_FILE).exists():
        assert job.is_alive(), "the job ended too early"
        time.sleep(0.2)
    code = main(["transition", str(run_dir), str(file)])
    return {DONE: COMMITTED, NOT_COMMITTED: ABORTED}.get(code, f"exit code {code}")
