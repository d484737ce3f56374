"""Plans as users may write them, right and wrong: each is taken, or refused with one `SpecError`
that names the schedule; nothing else, and nothing that takes long."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from nereus_verl import jobconfig, knobs, preflight
from nereus_verl.config import NereusConfig
from nereus_verl.rollout import plan_rollout, start_rollout

from nereus_plugins.spec import SpecError
from tests.unit.test_verl_config import job, models, put

SIZES = st.sampled_from([1, 2, 4, 8])
FRACTIONS = st.sampled_from([0.3, 1])
RECOMPUTE = st.sampled_from(["none", "selective", "full"])
SHARDINGS = st.sampled_from(["none", "zero1", "zero3", "fsdp", "hsdp"])
WRONG = st.sampled_from(
    [0, -1, 3, 1.5, float("nan"), float("inf"), True, None, "2", "", [], [1], {}, {"tp": 2},
     "0-3", "3-1", "0-99999999999", "9" * 5000, 10**12, 10**400]
)  # fmt: skip
KEYS = st.sampled_from(["tp", "tpp", "actor", "rollout", "leave", "devices", "knobs", 3, None])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[Any, Any]]:
    """Some of the fields, now and then with a wrong value, or a key that is not one."""
    rarely = st.integers(0, 29).map(lambda n: n == 0)
    values = {
        name: rarely.flatmap(lambda wrong, good=good: WRONG if wrong else good)
        for name, good in fields.items()
    }
    more = rarely.flatmap(lambda odd: st.dictionaries(KEYS, WRONG, max_size=1 if odd else 0))
    return st.tuples(st.fixed_dictionaries({}, optional=values), more).map(lambda p: p[0] | p[1])


SIZE = {name: SIZES for name in ("tp", "pp", "dp", "ulysses", "shard_size")}
LAYOUT = some(**SIZE, sharding=SHARDINGS, sequence_parallel=st.booleans())
KNOBS = {
    "micro_batch": SIZES,
    "token_budget_tokens": st.sampled_from([10, 4096]),
    "recompute": RECOMPUTE,
    "offload_params": st.booleans(),
    "offload_optimizer": st.booleans(),
}
UNIT = LAYOUT | some(**SIZE) | some(**KNOBS) | some(**SIZE, **KNOBS)
BESIDE = {
    "ranks": SIZES,
    "leave": st.lists(st.integers(0, 4), max_size=3),
    "rollout": some(tp=SIZES, replicas=SIZES, memory_fraction=FRACTIONS),
}
ASSIGNMENT = LAYOUT | some(
    layout=LAYOUT,
    knobs=some(**KNOBS, rollout_memory_fraction=FRACTIONS, offload_activations=st.booleans()),
    devices=st.sampled_from(["0-3", "4-7", [0, 1, 2, 3], [3, 2, 1, 0]]),
)
STAGES = ("actor-generate", "actor-train", "critic-values", "critic-train", "ref-logprob")
PLANS = (
    some(**BESIDE, actor=UNIT, critic=UNIT, ref=UNIT)
    | some(**BESIDE, **SIZE, **KNOBS)
    | some(assignments=some(**dict.fromkeys(STAGES, ASSIGNMENT)))
)
JOBS = {
    f"{engine} {rollout} {device}": put(
        put(job(engine), "actor_rollout_ref.rollout.name", rollout), "trainer.device", device
    )
    for engine in ("fsdp2", "megatron")
    for rollout in ("hf_cpu", "vllm", "sglang")
    for device in ("cpu", "cuda")
}


def run(name: str, plans: list[dict[Any, Any]]) -> None:
    """As before a job starts. Raises: SpecError."""
    config = JOBS[name]
    units = jobconfig.units(config)
    layouts = {unit: jobconfig.start_layout(config, at) for unit, at in units.items()}
    in_force = {unit: knobs.start_knobs(config, at) for unit, at in units.items()}
    rollout = start_rollout(config)
    schedule = NereusConfig.from_dict({"schedule": dict(enumerate(plans, 1))}).schedule
    for step, plan in schedule.items():
        where = f"nereus.schedule.{step}"
        targets, _, changed = preflight.plan_targets(
            config, models(), plan, layouts, in_force, where
        )
        layouts.update(targets)
        in_force.update(changed)
        world = layouts["actor"].world_size
        rollout = plan_rollout(plan, config=config, current=rollout, world=world, where=where)
        assert {layout.world_size for layout in layouts.values()} == {world}
        assert world % rollout.ranks == 0
        sharded = {"fsdp", "hsdp"} if name.startswith("fsdp2") else {"zero1"}
        assert {layout.sharding for layout in layouts.values()} <= sharded


@settings(max_examples=400, deadline=2000)
@given(st.sampled_from(sorted(JOBS)), st.lists(PLANS, min_size=1, max_size=2))
def test_any_plan(name: str, plans: list[dict[Any, Any]]) -> None:
    message = "nereus.schedule"
    try:
        run(name, plans)
    except SpecError as error:
        message = str(error)
    assert "nereus.schedule" in message
