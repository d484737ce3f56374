"""Reading and writing: strict, round, and natural for a person."""

import dataclasses
import pickle
import re
from pathlib import Path

import pytest

from nereus_plugins.spec import (
    Assignment,
    ClusterSpec,
    FrozenMap,
    GlobalPlan,
    GPUSpec,
    Knobs,
    Layout,
    LengthDistribution,
    LinkSpec,
    ModelSpec,
    ModelStage,
    MoESpec,
    OptimizerSpec,
    Record,
    SpecError,
    WorkloadSpec,
)

CLUSTER = ClusterSpec(
    nodes=2,
    gpus_per_node=8,
    gpu=GPUSpec("g", memory_bytes=80 * 2**30, peak_flops=1e15, memory_bandwidth_bytes_per_s=3e12),
    intra_node=LinkSpec(4e11, 1e-6),
    inter_node=LinkSpec(5e10),
)
WORKLOAD = WorkloadSpec(
    prompts_per_step=64,
    prompt_tokens=LengthDistribution.fixed(200),
    response_tokens=LengthDistribution(
        "quantiles", quantiles=((0.0, 10.0), (0.9, 800.0), (1.0, 4000.0)), max_tokens=2048
    ),
    samples_per_prompt=4,
    mini_batch_prompts=16,
    epochs=2,
)
MODEL = ModelSpec(
    name="m",
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=96,
    num_attention_heads=8,
    num_kv_heads=4,
    vocab_size=128,
    moe=MoESpec(num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24),
)
PLAN = GlobalPlan(
    {
        ModelStage.ACTOR_TRAIN: Assignment(Layout(tp=2, dp=2), Knobs(micro_batch=4)),
        ModelStage.CRITIC_TRAIN: Assignment(
            Layout(pp=2), Knobs(token_budget_tokens=8192, recompute="full"), devices=(2, 3)
        ),
        ModelStage.ACTOR_GENERATE: Assignment(Layout(), Knobs(rollout_memory_fraction=0.5)),
    },
    name="start",
)
RECORDS = [
    CLUSTER,
    WORKLOAD,
    MODEL,
    PLAN,
    OptimizerSpec(moments_dtype="bfloat16"),
    Layout(dp=4, ulysses=2, sharding="hsdp", shard_size=4),
    LengthDistribution.lognormal(500, 0.8, max_tokens=8192),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_round_trips(record: Record, tmp_path: Path) -> None:
    kind = type(record)
    assert kind.from_dict(record.to_dict()) == record
    assert kind.from_json(record.to_json()) == record
    assert kind.from_yaml(record.to_yaml()) == record
    assert pickle.loads(pickle.dumps(record)) == record
    assert hash(kind.from_yaml(record.to_yaml())) == hash(record)
    for name, text in (("a.json", record.to_json()), ("a.yaml", record.to_yaml())):
        (tmp_path / name).write_text(text)
        assert kind.load(tmp_path / name) == record


def test_plans_are_short_where_they_can_be() -> None:
    plan = GlobalPlan.from_yaml(
        """
        name: by hand
        assignments:
          actor-train: {tp: 2, pp: 1, dp: 2}
          critic-train:
            layout: {tp: 1, pp: 2, dp: 2}
            knobs: {token_budget_tokens: 16384}
            devices: 0-1,4,5
          ref-logprob:
            layout: {}
            devices: 3
        """
    )
    actor = plan.assignments[ModelStage.ACTOR_TRAIN]
    assert (actor.layout, actor.devices) == (Layout(tp=2, dp=2), (0, 1, 2, 3))
    critic = plan.assignments[ModelStage.CRITIC_TRAIN]
    assert critic.devices == (0, 1, 4, 5)
    assert plan.assignments[ModelStage.REF_LOGPROB].devices == (3,)
    assert plan.devices == (0, 1, 2, 3, 4, 5)
    assert ModelStage.CRITIC_VALUES.model == "critic"


def test_sizes_and_exponents_as_people_write_them() -> None:
    gpu = GPUSpec.from_yaml(
        "{name: g, memory_bytes: 80GiB, peak_flops: 9e14, memory_bandwidth_bytes_per_s: 3.3TB}"
    )
    assert gpu == GPUSpec("g", 80 * 2**30, 9e14, 3.3e12)
    assert LinkSpec.from_yaml("{bandwidth_bytes_per_s: 50e9, latency_s: 5e-6}") == LinkSpec(
        50e9, 5e-6
    )


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Layout, "{tpp: 2}", r"Layout: unknown key 'tpp'; did you mean 'tp'\?"),
        (Layout, "{zzzzzz: 2}", "unknown key 'zzzzzz'; valid keys: cp, dp"),
        (Layout, "[1]", "expected a mapping"),
        (Layout, "{tp: 2, tp: 4}", "key 'tp' is given twice"),
        (Layout, "{tp: [", "not valid YAML"),
        (Layout, "{? [1, 2] : 3}", "line 1: a key must be a text or a number"),
        (Layout, "{tp: 2020-99-99}", "not valid YAML: month must be"),
        (Layout, "{tp: !!int x}", "not valid YAML: invalid literal"),
        (Layout, "{tp: " + "9" * 5000 + "}", "line 1: a number of 5000 digits; 4000 is most"),
        (Layout, "[" * 3000, "not valid YAML"),
        (Layout, "{tp: 1000000, dp: 1000000}", "a layout has at most 131072 ranks"),
        (Layout, "{tp: '2'}", r"Layout\.tp must be an integer"),
        (GlobalPlan, "{name: a}", "required key 'assignments' is missing"),
        (GlobalPlan, "{assignments: {actor: {tp: 2}}}", "unknown key 'actor'; did you mean"),
        (
            GlobalPlan,
            "{assignments: {actor-train: {tq: 2}}}",
            r"GlobalPlan\.assignments\.actor-train\.layout: unknown key 'tq'",
        ),
        (
            GlobalPlan,
            "{assignments: {actor-train: {layout: {tp: 0}}}}",
            r"assignments\.actor-train\.layout: Layout\.tp must be",
        ),
        (
            GlobalPlan,
            "{assignments: {actor-train: {layout: {tp: 2}, devices: 0-}}}",
            "text like '0-3,8'",
        ),
        (GlobalPlan, "{assignments: {}}", "at least one model-stage"),
        (GPUSpec, "{name: g, memory_bytes: 80GiX}", "expected a number or a size such as 80GiB"),
        (GPUSpec, "{name: g, memory_bytes: '1e999'}", "memory_bytes: expected a number or a size"),
        (
            Knobs,
            "{rollout_memory_fraction: " + "9" * 400 + "}",
            "rollout_memory_fraction must be a",
        ),
        (WorkloadSpec, "{prompts_per_step: 4}", "required key 'prompt_tokens' is missing"),
        (LengthDistribution, "{kind: fixed}", "'fixed' needs tokens"),
        (LengthDistribution, "{kind: fixed, tokens: 3, sigma: 1}", "takes no sigma"),
        (
            LengthDistribution,
            "{kind: quantiles, quantiles: [[0, 5], [1, 4]]}",
            "must ascend from probability 0 to 1",
        ),
        (LengthDistribution, "{kind: quantiles, quantiles: [[0, 5, 6]]}", "expected 2 entries"),
        (Knobs, "{micro_batch: 2, token_budget_tokens: 9}", "set one of them"),
        (Knobs, "{rollout_memory_fraction: 1.5}", "above 0.0 and at most 1.0, got 1.5"),
        (Knobs, "{offload_params: 1}", "must be true or false"),
        (OptimizerSpec, "{name: sgd}", "must be one of adam"),
    ],
)
def test_errors_name_the_place_and_the_remedy(kind: type[Record], text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        kind.from_yaml(text)


@dataclasses.dataclass(frozen=True)
class Either(Record):
    """Unions whose later members count too."""

    often: int | str
    where: int | Layout | None = None


def test_any_member_of_a_union_is_accepted() -> None:
    assert Either.from_yaml("{often: auto}") == Either("auto")
    assert Either.from_yaml("{often: 3, where: {tp: 2}}") == Either(3, Layout(tp=2))
    assert Either.from_yaml("{often: 3, where: null}").where is None
    with pytest.raises(SpecError, match=r"often must be a whole number, .*often must be a text"):
        Either.from_yaml("{often: 0.5}")


@pytest.mark.parametrize("text", ["{", '{"tp": ' + "9" * 5000 + "}", "[" * 200_000])
def test_json_errors(text: str) -> None:
    with pytest.raises(SpecError, match="not valid JSON"):
        Layout.from_json(text)


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[1]"])
def test_errors_name_the_file(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(SpecError, match=f"^{re.escape(str(path))}: "):
        Layout.load(path)


def test_assignment_needs_a_device_for_each_rank() -> None:
    with pytest.raises(SpecError, match="takes 4 devices, 2 are assigned"):
        Assignment(Layout(tp=4), devices=(0, 1))
    with pytest.raises(SpecError, match="name one device twice"):
        Assignment(Layout(tp=2), devices=(1, 1))


def test_maps_are_frozen() -> None:
    given = {ModelStage.ACTOR_TRAIN: Assignment(Layout())}
    plan = GlobalPlan(given)
    given.clear()
    assert len(plan.assignments) == 1
    with pytest.raises(TypeError):
        plan.assignments[ModelStage.REF_LOGPROB] = Assignment(Layout())  # type: ignore[index]
    frozen = FrozenMap({"a": 1, "b": 2})
    assert frozen == {"b": 2, "a": 1}
    assert hash(frozen) == hash(FrozenMap([("b", 2), ("a", 1)]))
    with pytest.raises(AttributeError):
        frozen.x = 1  # type: ignore[attr-defined]


def test_cluster() -> None:
    assert CLUSTER.world_size == 16
    assert [CLUSTER.node_of(d) for d in (0, 7, 8, 15)] == [0, 0, 1, 1]
    with pytest.raises(SpecError, match="device 16 is not in a cluster of 16"):
        CLUSTER.node_of(16)


def test_workload() -> None:
    assert WORKLOAD.sequences_per_step == 256
    assert WORKLOAD.updates_per_step == 8
    with pytest.raises(SpecError, match="mini_batch_prompts=3 must divide prompts_per_step=4"):
        WorkloadSpec(4, LengthDistribution.fixed(1), LengthDistribution.fixed(1), 1, 3)
