"""verl's own vLLM rollout on vLLM's CPU build: `./dev vllm` makes its environment and runs this."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import psutil
import pytest
from nereus_verl.demo import launch

from nereus_plugins.trace.record import StepRecord, TransitionRecord, read_records
from tests.e2e import vllm_faults
from tests.e2e.jobs import small_job

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM's CPU build is not installed here; ./dev vllm runs this where it is",
    ),
]

TIMEOUT_S = 1200.0  # each launch of a vLLM server is many imports

# Mean difference of a sequence's log-probability a token between vLLM, which computes in fp32, and
# the actor, whose logits of up to 10 are bf16, of 8 bits of mantissa.
DIFFERENCE, CLOSE = "rollout_corr/log_ppl_abs_diff", 0.05
SIZES = (
    "actor/ulysses",
    "actor-generate/tp",
    "actor-generate/replicas",
    "actor-generate/rollout_memory_fraction",
)


def _run(
    directory: Path,
    name: str,
    *,
    env: dict[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    **settings: Any,
) -> launch.JobResult:
    job = small_job(
        directory / "task",
        "fsdp2",
        2,
        hidden=128,  # vLLM's CPU attention takes heads of at least 32
        critic=False,
        rollout="vllm",
        rollout_tp=1,
        actor_lr=2e-2,
        batch_prompts=32,
        mini_batch_prompts=8,
        **settings,
    )
    result = launch.run(job, directory / name, timeout_s=TIMEOUT_S, env=env, on_line=on_line)
    return result.require_success()


def _differences(result: launch.JobResult) -> list[float]:
    return [step[DIFFERENCE] for step in result.metrics]


def _records(directory: Path, name: str, kind: type[Any]) -> list[Any]:
    run_dir = directory / name / "checkpoints" / "nereus"
    return [record for record in read_records(run_dir) if isinstance(record, kind)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@dataclass
class Followed:
    """The job in which all goes well. processes: of vLLM, after each transition."""

    result: launch.JobResult
    transitions: list[Any]
    processes: list[int]
    left_behind: set[str]


@pytest.fixture(scope="module")
def followed(directory: Path) -> Followed:
    """Two servers of one rank -> one of two, as training goes to Ulysses 2 -> less memory for it
    -> one server of the only rank -> that one, and another for the rank that joins."""
    schedule = {
        2: {"ulysses": 2, "rollout": {"tp": 2}},
        3: {"rollout": {"memory_fraction": 0.06}},
        4: {"ranks": 1, "ulysses": 1, "rollout": {"tp": 1}},
        5: {"ranks": 2},
    }
    before, processes = _left_behind(), []

    def count(line: str) -> None:
        if " committed: " in line:
            processes.append(_engine_processes())

    nereus = {"schedule": schedule}
    result = _run(directory, "followed", steps=7, nereus=nereus, on_line=count)
    transitions = _records(directory, "followed", TransitionRecord)
    return Followed(result, transitions, processes, _left_behind() - before)


def test_vllm_follows_training(directory: Path, followed: Followed) -> None:
    """What vLLM samples earns more and more, and the actor gives its tokens the probabilities that
    vLLM gave them, before and after each transition."""
    outcomes = [(t.outcome, t.reason) for t in followed.transitions]
    assert outcomes == [("committed", "")] * 4
    assert followed.transitions[0].units["actor"]["verified"]["bytes"] > 0
    steps = _records(directory, "followed", StepRecord)
    assert [s.epoch for s in steps] == [0, 0, 1, 2, 3, 4, 4]
    metrics = followed.result.metrics
    sizes = [tuple(m[f"nereus/{name}"] for name in SIZES) for m in metrics]
    assert sizes == [
        (1, 1, 2, 0.08),
        (1, 1, 2, 0.08),
        (2, 2, 1, 0.08),
        (2, 2, 1, 0.06),
        (1, 1, 1, 0.06),
        (1, 1, 2, 0.06),
        (1, 1, 2, 0.06),
    ]
    assert max(_differences(followed.result)) < CLOSE, _differences(followed.result)
    rewards = [m["critic/score/mean"] for m in metrics]
    assert rewards[-1] > rewards[0] + 0.05, rewards


def test_servers_are_launched_and_ended(followed: Followed) -> None:
    rollouts = [t.rollout for t in followed.transitions]
    assert [(r["kept"], r["ended"], r["launched"]) for r in rollouts] == [
        ([], [0, 1], [0]),
        ([], [0], [0]),
        ([], [0], [0]),
        ([0], [], [1]),
    ]
    for rollout in rollouts:
        launched = [one for one in rollout["replicas"] if "seconds" in one]
        assert [one["replica"] for one in launched] == rollout["launched"]
        for one in launched:
            assert one["seconds"].keys() >= {"start", "load", "profile", "capture"}
            assert all(spent >= 0 for spent in one["seconds"].values())
        assert rollout["tensors"] == 2 * 12 + 3  # two layers, embedding, norm, head
    assert len({rollout["fingerprint"] for rollout in rollouts}) == 4, "training went on"
    # An engine and its workers for each server, and none of those that ended.
    assert followed.processes == [3, 3, 2, 4]
    assert followed.left_behind == set()


def test_weights_that_are_lost_are_noticed(directory: Path) -> None:
    """A server of two ranks loses what it is sent: the two before are back, with the right weights.
    Later these lose theirs too, unchecked, as nothing changed: then vLLM generates with other
    weights than the actor's, and the difference shows it."""
    env = vllm_faults.environment({2: 1, 1: 2})
    nereus = {"schedule": {1: {"rollout": {"tp": 2}}}}
    result = _run(directory, "lost", steps=4, nereus=nereus, env=env)
    (transition,) = _records(directory, "lost", TransitionRecord)
    assert transition.outcome == "aborted"
    assert "has parameters that no synced weight was written to" in transition.reason
    assert transition.rollout["ended"] == [0, 1, 0]
    assert transition.rollout["launched"] == [0, 0, 1]
    first, second, _, last = _differences(result)
    assert max(first, second) < CLOSE
    assert last > 2 * CLOSE


def _engine_processes() -> int:
    """vLLM's processes of the jobs that this test started; it names them."""
    found = 0
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Ray's come and go
            found += one.name().startswith("VLLM::")
    return found


def _left_behind() -> set[str]:
    """Sockets and shared memory of servers that ended, had they been left."""
    memory = ("verl_weights_*", "vllm_dist_*", "psm_*")
    sockets = ("rl-colocate-zmq-*", "nereus-vllm-*", "????????-????-????-????-????????????")
    names = [f"/dev/shm/{name}" for name in memory] + [f"/tmp/{name}" for name in sockets]
    return {path for name in names for path in glob(name)}
