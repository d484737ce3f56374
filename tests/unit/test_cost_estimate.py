"""Whole jobs: users' reports answered rightly, placement, the command."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

import nereus_plugins
from nereus_plugins.cost.case import uneven_stages
from nereus_plugins.cost.cli import main, read_model
from nereus_plugins.cost.estimate import (
    Estimate,
    Placed,
    StageEstimate,
    batch_of,
    estimate,
    unit_costs,
)
from nereus_plugins.cost.explain import cluster_of, explanation
from nereus_plugins.cost.hardware import find_gpu
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.cost.memory import OUTSIDE_TORCH_BYTES
from nereus_plugins.cost.models import as_shape
from nereus_plugins.cost.rollout import cache_bytes_per_token
from nereus_plugins.cost.shape import Shape
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelStage,
    SpecError,
    WorkloadSpec,
)

S = ModelStage


def lengths(median: float, longest: int) -> LengthDistribution:
    return LengthDistribution.lognormal(median, 0.5, max_tokens=longest)


def grpo(
    model: str,
    gpu: str,
    gpus: int,
    train: Layout,
    *,
    rollout_tp: int,
    prompt: int = 512,
    response: int = 1024,
    backend: str = "fsdp",
    fraction: float = 0.5,
    **knobs: object,
) -> Estimate:
    trained = Knobs(recompute="full", **knobs)  # type: ignore[arg-type]
    sizes = {k: v for k, v in knobs.items() if k in ("micro_batch", "token_budget_tokens")}
    plan = GlobalPlan(
        {
            S.ACTOR_GENERATE: Assignment(
                Layout(tp=rollout_tp, dp=gpus // rollout_tp),
                Knobs(rollout_memory_fraction=fraction),
            ),
            # verl's recipes keep the reference offloaded.
            S.REF_LOGPROB: Assignment(train, Knobs(offload_params=True, **sizes)),  # type: ignore[arg-type]
            S.ACTOR_TRAIN: Assignment(train, trained),
        }
    )
    workload = WorkloadSpec(
        256, LengthDistribution.fixed(prompt), lengths(response / 2, response), 5, 64
    )
    job = JobSpec(read_model(model), backend=backend)
    return estimate(job, plan, cluster_of(gpu, gpus), workload)


# Users' reports: what ran and what ran out of memory. Where the report leaves the micro-batch open,
# the recipe's small one is taken.


def test_7b_grpo_on_2_h800_runs() -> None:
    assert grpo(
        "qwen2-7b", "h800", 2, Layout(dp=2, sharding="fsdp"), rollout_tp=2, micro_batch=2,
        offload_optimizer=True, offload_params=True,
    ).fits  # fmt: skip


def test_14b_grpo_on_4_h800_with_offload_runs() -> None:
    assert grpo(
        "qwen2.5-14b", "h800", 4, Layout(dp=4, sharding="fsdp"), rollout_tp=4, micro_batch=2,
        offload_optimizer=True, offload_params=True,
    ).fits  # fmt: skip


def test_14b_grpo_on_8_h100_at_24000_tokens_runs_out() -> None:
    out = grpo(
        "qwen2.5-14b", "h100", 8, Layout(dp=8, sharding="fsdp"), rollout_tp=8, response=512,
        token_budget_tokens=24000,
    )  # fmt: skip
    assert not out.fits
    assert out.peak.stage is S.ACTOR_TRAIN
    assert max(out.peak.memory, key=lambda p: p.value).name == "logits"


def test_32b_grpo_on_8_h20_megatron_runs() -> None:
    assert grpo(
        "qwen2.5-32b", "h20", 8, Layout(tp=4, pp=2, sharding="zero1", sequence_parallel=True),
        rollout_tp=4, backend="megatron", micro_batch=4, offload_optimizer=True,
        offload_params=True,
    ).fits  # fmt: skip


@pytest.mark.parametrize("gpu", ["h20", "h800"])
def test_70b_grpo_on_32_runs(gpu: str) -> None:
    assert grpo(
        "qwen2-72b", gpu, 32, Layout(dp=32, sharding="fsdp"), rollout_tp=8, micro_batch=2,
        offload_optimizer=True, offload_params=True,
    ).fits  # fmt: skip


def ppo_8b(response: int) -> Estimate:
    """Llama-3-8B PPO on 8 x H100-80, ZeRO-2 with Adam offload, micro-batch 2, all resident."""
    actor = read_model("llama3-8b")
    value = read_model("llama3-8b", value_head=True)
    job = JobSpec(
        actor, algorithm="ppo", critic=value, reward=value, backend="deepspeed", packed=False,
        cpu_adam=True, updates_together=True,
    )  # fmt: skip
    train = Layout(dp=8, sharding="zero2")
    knobs = Knobs(micro_batch=2, recompute="full")
    plan = GlobalPlan(
        {stage: Assignment(train, knobs) for stage in job.stages() if stage is not S.ACTOR_GENERATE}
        | {S.ACTOR_GENERATE: Assignment(Layout(dp=8), Knobs(rollout_memory_fraction=0.3))}
    )
    fixed = LengthDistribution.fixed
    workload = WorkloadSpec(128, fixed(1024), fixed(response), 1, 32)
    return estimate(job, plan, cluster_of("h100", 8), workload)


def test_8b_ppo_runs_out_as_responses_grow() -> None:
    growing = [ppo_8b(response).stages[S.ACTOR_TRAIN] for response in (128, 512, 1024, 2048)]
    peaks = [stage.reserved_bytes for stage in growing]
    assert peaks == sorted(peaks)
    assert growing[0].fits
    # At 1024 nothing is left that a plan keeps free; the engine beside has no room at all.
    assert peaks[2] > 0.94 * growing[2].capacity_bytes
    assert not ppo_8b(1024).fits
    assert not growing[-1].fits


def test_what_openrlhf_leaves_on_the_gpu() -> None:
    """Asleep, a model's weights stay; a CPU optimizer takes gradients along; engines may stay."""
    base = JobSpec(read_model("llama3-8b"), backend="deepspeed")
    knobs = Knobs(micro_batch=2, recompute="full")

    def beside(job: JobSpec, knobs: Knobs) -> Mapping[str, float]:
        train = Assignment(Layout(dp=8, sharding="zero2"), knobs)
        plan = GlobalPlan({
            S.ACTOR_TRAIN: train, S.REF_LOGPROB: train,
            S.ACTOR_GENERATE: Assignment(Layout(dp=8), Knobs(rollout_memory_fraction=0.3)),
        })  # fmt: skip
        workload = WorkloadSpec(128, LengthDistribution.fixed(512), LengthDistribution.fixed(512))
        return estimate(job, plan, cluster_of("h100", 8), workload).stages[S.REF_LOGPROB].resting

    weights = 2.0 * as_shape(base.actor).num_parameters()
    state = 12.0 / 2.0 * weights / 8
    awake = beside(base, knobs)["actor"]
    asleep = beside(base, dataclasses.replace(knobs, offload_optimizer=True))["actor"]
    assert awake == pytest.approx(weights + state + OUTSIDE_TORCH_BYTES)
    assert asleep == pytest.approx(weights + OUTSIDE_TORCH_BYTES)
    on_host = dataclasses.replace(base, cpu_adam=True)
    assert beside(on_host, knobs)["actor"] == asleep
    averaging = dataclasses.replace(base, average=True)
    assert beside(averaging, knobs)["actor"] == pytest.approx(awake + weights)
    assert "rollout" not in beside(base, knobs)
    held = beside(dataclasses.replace(base, engine_sleeps=False), knobs)["rollout"]
    assert held == pytest.approx(0.3 * find_gpu("h100").memory_bytes)


def test_jobs_know_the_attention_of_models_that_ship() -> None:
    """Multi-latent attention: one latent of cache a token, whatever tensor parallelism."""
    shape = as_shape(read_model("deepseek-v3"))
    assert shape.mla is not None
    assert shape.mtp_layers == 0
    assert cache_bytes_per_token(shape, Layout(tp=8)) == 2 * 61 * (512 + 64)
    assert as_shape(read_model("deepseek-v3", value_head=True)).mla == shape.mla
    other = dataclasses.replace(read_model("deepseek-v3"), hidden_size=4096)
    assert as_shape(other).mla is None


def test_uneven_stages_are_estimated_as_megatron_cuts_them() -> None:
    assert uneven_stages(61, 4) == (15, 14)
    assert uneven_stages(28, 3) == (9, 9)
    assert uneven_stages(7, 2) == (4, 3)
    assert uneven_stages(28, 4) is None
    assert uneven_stages(9, 7) is None
    job = JobSpec(read_model("qwen2.5-7b"), algorithm="sft", reference=False, backend="megatron")

    def train(pp: int, vpp: int = 1) -> Estimate:
        layout = Layout(pp=pp, dp=12 // pp, vpp=vpp, sharding="zero1")
        plan = GlobalPlan({S.ACTOR_TRAIN: Assignment(layout, Knobs(token_budget_tokens=4096))})
        work = WorkloadSpec(256, lengths(500, 2048), lengths(500, 2048))
        return estimate(job, plan, cluster_of("h100", 12, 4), work)

    two, three, four = (train(pp).iteration_s for pp in (2, 3, 4))
    assert 0.8 < three / (0.5 * (two + four)) < 1.2
    with pytest.raises(SpecError, match="layers = 28"):
        train(3, vpp=2)


def test_selective_recompute_saves_nothing_under_flash_attention() -> None:
    """Why the planner does not try it: attention's output is kept for the product after it."""
    job = JobSpec(read_model("qwen2.5-7b"), backend="megatron", reference=False)
    stages = (S.ACTOR_TRAIN,)
    work = WorkloadSpec(256, lengths(500, 2048), lengths(500, 2048))
    none, selective = (
        unit_costs(
            job, stages, Placed(Layout(tp=2, dp=4, sequence_parallel=True, sharding="zero1"),
            Knobs(token_budget_tokens=8192, recompute=kind)), cluster_of("h100", 8), work,
        )[0]
        for kind in ("none", "selective")
    )  # fmt: skip
    assert selective.seconds > none.seconds
    assert selective.peak_bytes == none.peak_bytes


def test_the_longest_micro_batch_decides_not_the_mean() -> None:
    job = JobSpec(read_model("qwen2.5-7b"))
    assignment = Assignment(Layout(dp=8, sharding="fsdp"), Knobs(token_budget_tokens=4096))
    tailed = WorkloadSpec(
        64, LengthDistribution.fixed(256), LengthDistribution.lognormal(1000, 1.0, max_tokens=16384)
    )
    batch = batch_of(job, assignment, tailed, 64.0)
    assert batch.longest_tokens > 8000
    assert batch.tokens < 4096 * 1.2


def test_two_kv_heads_forbid_tp4_in_training_and_repeat_in_rollout() -> None:
    model = read_model("qwen2.5-1.5b")
    with pytest.raises(SpecError, match="key-value heads = 2"):
        grpo(
            "qwen2.5-1.5b", "h100", 4,
            Layout(tp=4, sharding="zero1", sequence_parallel=True),
            rollout_tp=4, backend="megatron", micro_batch=1,
        )  # fmt: skip
    shape = Shape(model)
    two, four = (cache_bytes_per_token(shape, Layout(tp=n)) for n in (2, 4))
    assert two == four


def test_rollout_memory_must_be_released_before_training_state_returns() -> None:
    """What does not fit together fits when the training state is offloaded meanwhile."""
    layout = Layout(dp=8, sharding="fsdp")
    stays = grpo("qwen2.5-32b", "h100", 8, layout, rollout_tp=4, fraction=0.6, micro_batch=1)
    leaves = grpo(
        "qwen2.5-32b", "h100", 8, layout, rollout_tp=4, fraction=0.6, micro_batch=1,
        offload_params=True, offload_optimizer=True,
    )  # fmt: skip
    assert not stays.stages[S.ACTOR_GENERATE].fits
    assert leaves.stages[S.ACTOR_GENERATE].fits
    assert "actor" in stays.stages[S.ACTOR_GENERATE].resting


def test_an_engine_without_room_for_one_sequence_says_what_to_change() -> None:
    out = grpo(
        "qwen2.5-32b", "h100", 8, Layout(dp=8, sharding="fsdp"), rollout_tp=1, fraction=0.6,
        micro_batch=1,
    )  # fmt: skip
    (note,) = out.stages[S.ACTOR_GENERATE].notes
    assert "raise rollout_memory_fraction or tp" in note
    assert not out.fits


def test_stages_on_other_devices_run_beside() -> None:
    job = JobSpec(read_model("llama3-8b"))
    half = Layout(dp=4, sharding="fsdp")
    knobs = Knobs(micro_batch=1, recompute="full")

    def plan(reference: tuple[int, ...]) -> GlobalPlan:
        return GlobalPlan(
            {
                S.ACTOR_GENERATE: Assignment(Layout(dp=4), devices=(0, 1, 2, 3)),
                S.REF_LOGPROB: Assignment(half, Knobs(micro_batch=1), reference),
                S.ACTOR_TRAIN: Assignment(half, knobs, (0, 1, 2, 3)),
            }
        )

    workload = WorkloadSpec(64, LengthDistribution.fixed(512), lengths(500, 1024), 4)
    cluster = cluster_of("h100", 8)
    apart = estimate(job, plan((4, 5, 6, 7)), cluster, workload)
    together = estimate(job, plan((0, 1, 2, 3)), cluster, workload)
    assert apart.iteration_s == pytest.approx(together.iteration_s)  # training needs the reference
    assert "ref" in together.stages[S.ACTOR_GENERATE].resting
    assert "ref" not in apart.stages[S.ACTOR_GENERATE].resting


def test_a_longer_tail_costs_generation_time() -> None:
    job = JobSpec(read_model("llama3-8b"), reference=False)
    plan = GlobalPlan(
        {
            S.ACTOR_GENERATE: Assignment(Layout(dp=8)),
            S.ACTOR_TRAIN: Assignment(
                Layout(dp=8, sharding="fsdp"), Knobs(micro_batch=1, recompute="full")
            ),
        }
    )

    def seconds(sigma: float) -> tuple[float, float]:
        # The same mean: median falls as sigma grows.
        median = 2000 / 2.718281828 ** (sigma * sigma / 2)
        response = LengthDistribution.lognormal(median, sigma, max_tokens=32768)
        workload = WorkloadSpec(128, LengthDistribution.fixed(512), response, 4)
        stage = estimate(job, plan, cluster_of("h100", 8), workload).stages[S.ACTOR_GENERATE]
        return stage.seconds, stage.part("tail") / stage.seconds

    even, tailed = seconds(0.1), seconds(1.0)
    assert tailed[0] > 1.5 * even[0]
    assert tailed[1] > 0.5


def test_calibration_scales_time_and_memory() -> None:
    class Twice:
        def seconds(self, stage: ModelStage, assignment: Assignment, predicted_s: float) -> float:
            return 2.0 * predicted_s if stage is S.ACTOR_TRAIN else predicted_s

        def bytes(self, stage: ModelStage, assignment: Assignment, predicted_bytes: float) -> float:
            return 1.1 * predicted_bytes

    job = JobSpec(read_model("qwen2.5-1.5b"), algorithm="sft", reference=False)
    plan = GlobalPlan(
        {S.ACTOR_TRAIN: Assignment(Layout(dp=8, sharding="fsdp"), Knobs(micro_batch=4))}
    )
    workload = WorkloadSpec(256, LengthDistribution.fixed(1), LengthDistribution.fixed(2047))
    cluster = cluster_of("h100", 8)
    plain = estimate(job, plan, cluster, workload)
    scaled = nereus_plugins.estimate(job, plan, cluster, workload, Twice())
    assert scaled.iteration_s == pytest.approx(2 * plain.iteration_s)
    assert scaled.peak.reserved_bytes > plain.peak.reserved_bytes
    assert set(plain.stages) == {S.ACTOR_TRAIN}


def test_a_stage_without_assignment_is_named() -> None:
    job = JobSpec(read_model("qwen2.5-1.5b"))
    plan = GlobalPlan({S.ACTOR_TRAIN: Assignment(Layout(dp=8, sharding="fsdp"))})
    workload = WorkloadSpec(8, LengthDistribution.fixed(1), LengthDistribution.fixed(1))
    with pytest.raises(SpecError, match="actor-generate of the job has no assignment"):
        estimate(job, plan, cluster_of("h100", 8), workload)


COMMAND = ["--model", "qwen2.5-7b", "--gpu", "h100", "--gpus", "8", "--prompts", "64"]


def test_the_command_prints_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--explain"]) in (0, 1)
    text = capsys.readouterr().out
    for word in ("iteration", "actor-train", "logits", "gemm", "tail", "weight_sync", "kv_cache"):
        assert word in text


def test_the_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    main([*COMMAND, "--json"])
    out = json.loads(capsys.readouterr().out)
    stage = out["stages"]["actor-train"]
    assert sum(p["value"] for p in stage["parts"]) == pytest.approx(stage["seconds"])
    assert all(p["formula"] for p in stage["parts"] + stage["memory"])


def test_the_command_says_when_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    big = ["--model", "qwen2.5-72b", "--gpu", "a100_40gb", "--gpus", "8"]
    assert main(big) == 1
    assert "does NOT fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100", "--gpus", "8"], "--model is required"),
        (["--model", "qwen2.5-7b", "--gpu", "h101", "--gpus", "8"], "h101"),
        ([*COMMAND, "--tp", "3"], "--tp"),
        (["--model", "deepseek-v9", "--gpu", "h100", "--gpus", "8"], "nearest: deepseek"),
    ],
)
def test_the_command_names_the_setting_at_fault(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_command_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = JobSpec(read_model("qwen2.5-1.5b"), algorithm="sft", reference=False)
    plan = GlobalPlan({S.ACTOR_TRAIN: Assignment(Layout(dp=8, sharding="fsdp"))})
    workload = WorkloadSpec(64, LengthDistribution.fixed(1), LengthDistribution.fixed(1023))
    arguments = []
    for name, record in (
        ("job", job),
        ("plan", plan),
        ("cluster", cluster_of("h100", 8)),
        ("workload", workload),
    ):
        path = tmp_path / f"{name}.yaml"
        path.write_text(record.to_yaml(), encoding="utf-8")
        arguments += [f"--{name}", str(path)]
    assert main(arguments) == 0
    assert "actor-train" in capsys.readouterr().out


def test_explanation_names_formulas() -> None:
    out = grpo("qwen2.5-7b", "h100", 8, Layout(dp=8, sharding="fsdp"), rollout_tp=1, micro_batch=1)
    assert "2mnk / (peak" in explanation(out)


def test_a_rank_on_cpu_holds_what_its_tensors_take() -> None:
    """Nothing of a GPU lies beside them, and work takes as much longer as there is more of it."""
    model = dataclasses.replace(
        read_model("qwen2.5-0.5b"), num_layers=2, hidden_size=64, ffn_hidden_size=128,
        num_attention_heads=4, num_kv_heads=2, head_dim=16, vocab_size=264,
    )  # fmt: skip
    job = JobSpec(model, reference=False)
    knobs = Knobs(token_budget_tokens=1 << 20)
    plan = GlobalPlan(
        {
            S.ACTOR_GENERATE: Assignment(Layout(dp=2)),
            S.ACTOR_TRAIN: Assignment(Layout(dp=2, sharding="fsdp"), knobs),
        }
    )

    def of(tokens: int) -> StageEstimate:
        lengths = LengthDistribution.fixed(tokens)
        workload = WorkloadSpec(32, LengthDistribution.fixed(32), lengths)
        return estimate(job, plan, cluster_of("cpu", 2), workload).stages[S.ACTOR_TRAIN]

    short, long = of(96), of(480)  # 128 and 512 tokens a sequence
    assert short.reserved_bytes < 64 * 2**20
    assert 3 < long.reserved_bytes / short.reserved_bytes < 4.5
    assert 3 < long.seconds / short.seconds < 6
