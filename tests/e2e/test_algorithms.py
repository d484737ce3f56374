"""verl's advantage estimators, its group filtering and its KL penalties, across a transition.

Each job changes layout, sequence parallelism or ranks after its first step: the state is the same
bits before and after, and every step trains.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from nereus_verl.demo import launch

from nereus_plugins.trace.record import TransitionRecord, read_records
from tests.e2e import observe
from tests.e2e.jobs import TIMEOUT_S, small_job

KL_IN_REWARD = ["algorithm.use_kl_in_reward=True", "actor_rollout_ref.actor.use_kl_loss=False"]
FILTERED = [
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=reward",
    # verl's own replay buffer: only that one filters.
    "trainer.v1.sampler.custom_sampler.path=null",
    "trainer.v1.sampler.custom_sampler.name=null",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.loss_agg_mode=token-mean",
]
# name -> engine, whether there is a reference, a plan, overrides
ALGORITHMS: dict[str, tuple[str, bool, dict[str, Any], list[str]]] = {
    "rloo with KL in the loss": (
        "fsdp2",
        True,
        {"ranks": 1},
        ["algorithm.adv_estimator=rloo"],
    ),
    "reinforce++ with KL in the reward": (
        "megatron",
        True,
        {"tp": 2},
        ["algorithm.adv_estimator=reinforce_plus_plus", *KL_IN_REWARD],
    ),
    "dapo": ("fsdp2", False, {"ranks": 1}, FILTERED),
}


@pytest.mark.full
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_goes_through_a_transition(tmp_path: Path, name: str) -> None:
    engine, reference, plan, extra = ALGORITHMS[name]
    filtered = extra == FILTERED
    job = small_job(
        tmp_path / "task",
        engine,
        2,
        critic=False,
        reference=reference,
        steps=3,
        # Of two characters, often none is right: groups without a difference, which are filtered.
        response_tokens=2 if filtered else 16,
        nereus={"schedule": {1: plan}},
        extra=["actor_rollout_ref.rollout.tensor_model_parallel_size=1", *extra],
    )
    env = observe.environment(tmp_path / "observed")
    result = launch.run(job, tmp_path / "job", timeout_s=TIMEOUT_S, env=env).require_success()

    run_dir = tmp_path / "job" / "checkpoints" / "nereus"
    (transition,) = [r for r in read_records(run_dir) if isinstance(r, TransitionRecord)]
    assert (transition.outcome, transition.step) == ("committed", 1)
    before, after = observe.read(tmp_path / "observed")
    assert before["units"] == after["units"]
    units = {"actor"} | ({"ref"} if reference else set())
    assert before["units"].keys() == units
    assert [m["step"] for m in result.metrics] == [1, 2, 3]
    for metrics in result.metrics:
        assert math.isfinite(metrics["actor/grad_norm"])
        assert metrics["actor/grad_norm"] > 0
    evicted = [m.get("training/filter_groups/evicted_samples", 0) for m in result.metrics]
    assert (sum(evicted) > 0) == filtered, evicted
    in_reward = any("use_kl_in_reward" in setting for setting in extra)
    assert all(("actor/reward_kl_penalty" in m) == in_reward for m in result.metrics)
    in_loss = reference and not in_reward
    assert all(("actor/kl_loss" in m) == in_loss for m in result.metrics)
