"""Launch commands read and judged; plans written as flags and read back."""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

import pytest

from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.planner import openrlhf_launch, plan
from nereus_plugins.planner.check import main
from nereus_plugins.planner.flags import launch_flags, openrlhf_flags
from nereus_plugins.planner.launch import read_launch, words_of_script
from nereus_plugins.planner.openrlhf_launch import OLD_NAMES
from nereus_plugins.planner.openrlhf_options import OPTIONS, VERSION
from nereus_plugins.spec import (
    Knobs,
    Layout,
    LengthDistribution,
    ModelStage,
    SpecError,
    WorkloadSpec,
)

S = ModelStage


def verl(model: str, *more: str) -> list[str]:
    return [
        "python3", "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={model}", "data.train_batch_size=256",
        "data.max_prompt_length=512", "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.rollout.n=5", *more,
    ]  # fmt: skip


def openrlhf(response: int, *more: str) -> list[str]:
    return [
        "openrlhf.cli.train_ppo_ray", "--pretrain", "meta-llama/Meta-Llama-3-8B",
        "--reward_pretrain", "meta-llama/Meta-Llama-3-8B", "--actor_num_nodes", "1",
        "--actor_num_gpus_per_node", "8", "--colocate_all_models", "--vllm_num_engines", "8",
        "--vllm_gpu_memory_utilization", "0.3", "--zero_stage", "2", "--adam_offload",
        "--micro_train_batch_size", "2", "--train_batch_size=32", "--rollout_batch_size", "128",
        "--prompt_max_len", "1024", "--generate_max_len", str(response),
        "--gradient_checkpointing", "--bf16", *more,
    ]  # fmt: skip


def check(
    capsys: pytest.CaptureFixture[str], gpu: str, words: list[str], *options: str
) -> tuple[int, dict]:
    status = main(["--gpu", gpu, "--json", *options, "--", *words])
    return status, json.loads(capsys.readouterr().out)


def parser_options(source: str) -> frozenset[str]:
    """The first argument of every `add_argument`, loops over names written out."""
    found: set[str] = set()

    def visit(node: ast.AST, bound: dict[str, str]) -> None:
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            assert isinstance(node.target, ast.Name)
            for value in node.iter.elts:
                for statement in node.body:
                    visit(statement, {**bound, node.target.id: ast.literal_eval(value)})
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "parser.add_argument":
            found.add(eval(ast.unparse(node.args[0]), dict(bound)).removeprefix("--"))
        for child in ast.iter_child_nodes(node):
            visit(child, bound)

    visit(ast.parse(source), {})
    return frozenset(found)


SMALL = [
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
]


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("h800", verl("Qwen/Qwen2-7B-Instruct", *SMALL, "trainer.n_gpus_per_node=2")),
        (
            "h800",
            verl(
                "Qwen/Qwen2.5-14B-Instruct", *SMALL, "trainer.n_gpus_per_node=4",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
            ),
        ),
        (
            "h20",
            verl(
                "Qwen/Qwen2-72B-Instruct", *SMALL, "trainer.nnodes=4",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
            ),
        ),
    ],
)  # fmt: skip
def test_what_users_ran_fits(
    gpu: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out = check(capsys, gpu, words)
    assert status == 0
    assert out["fits"]
    assert out["longest_response_tokens"] > 512
    assert out["changes"] == []


def test_14b_at_24000_tokens_does_not_fit_and_a_smaller_budget_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = verl(
        "Qwen/Qwen2.5-14B-Instruct",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000",
        "actor_rollout_ref.actor.entropy_coeff=0.001",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=8",
    )
    status, out = check(capsys, "h100", words)
    assert status == 1
    assert out["peak_stage"] == "actor-train"
    settings = [setting for change in out["changes"] for setting in change["settings"]]
    assert any("ppo_max_token_len_per_gpu" in setting for setting in settings)
    # What it says to change makes it fit.
    words += out["changes"][0]["settings"][0].split()
    assert check(capsys, "h100", words)[0] == 0


def test_8b_ppo_runs_out_as_responses_grow(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = check(capsys, "h100", openrlhf(1024))
    assert status == 1
    assert out["framework"] == "openrlhf"
    # Four models whole on every GPU: only sharding them helps, and what it says does.
    assert all("--zero_stage 3" in change["settings"] for change in out["changes"])
    sharded = openrlhf(1024, *" ".join(out["changes"][0]["settings"]).split())
    status, out = check(capsys, "h100", sharded)
    assert status == 0
    until = out["longest_response_tokens"]
    assert 1024 < until < 100_000
    assert check(capsys, "h100", [*sharded, "--generate_max_len", str(until)])[0] == 0
    assert check(capsys, "h100", [*sharded, "--generate_max_len", str(until * 5 // 4)])[0] == 1


def test_the_text_says_what_and_until_when(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu", "h100", "--", *openrlhf(1024)]) == 1
    text = capsys.readouterr().out
    assert "does NOT fit" in text
    assert "resting beside" in text or "largest part" in text
    assert "to make it fit" in text


def today(*more: str) -> list[str]:
    """A command in the names of 0.11."""
    return [
        "openrlhf.cli.train_ppo_ray", "--actor.model_name_or_path", "llama3-8b",
        "--reward.model_name_or_path", "llama3-8b", "--vllm.num_engines", "8",
        "--train.colocate_all", *more,
    ]  # fmt: skip


def test_openrlhfs_defaults() -> None:
    launch = read_launch(today())
    at = launch.plan.assignments
    assert launch.job.algorithm == "ppo"
    assert launch.job.updates_together
    assert not launch.job.average
    assert read_launch(today("--train.enable_ema")).job.average
    assert not launch.job.engine_sleeps
    assert not launch.job.entropy
    assert launch.job.software(S.ACTOR_TRAIN).grad_bytes == 2
    assert at[S.ACTOR_TRAIN].layout == Layout(dp=8, sharding="zero2")
    assert at[S.ACTOR_TRAIN].knobs == Knobs(micro_batch=1)
    assert at[S.CRITIC_VALUES].knobs == Knobs(micro_batch=1)
    assert at[S.REF_LOGPROB].layout == Layout(dp=8)
    assert at[S.ACTOR_GENERATE].knobs.rollout_memory_fraction == 0.95
    assert (launch.prompts, launch.samples, launch.mini_batch_prompts) == (1024, 1, 128)
    assert launch.prompt_tokens + launch.response_tokens == 2048


@pytest.mark.parametrize(
    ("update", "samples", "prompts", "expected"),
    [(128, 1, 1024, 128), (128, 8, 128, 16), (128, 6, 1024, 16), (4, 8, 128, 1), (999, 1, 64, 64)],
)
def test_openrlhfs_updates_in_whole_parts_of_a_rollout(
    update: int, samples: int, prompts: int, expected: int
) -> None:
    part = openrlhf_launch.prompts_of_update(update, samples, prompts)
    assert part == expected
    assert prompts % part == 0


def test_openrlhfs_sleep_offload_ring_and_budgets() -> None:
    launch = read_launch(
        today(
            "--ds.enable_sleep", "--vllm.enable_sleep", "--ref.offload", "--ds.ring_attn_size", "2",
            "--train.dynamic_batch_enable", "--rollout.max_tokens_per_gpu", "32384",
            "--data.max_len", "9216", "--rollout.max_new_tokens", "8192", "--actor.entropy_coef=0",
        )
    )  # fmt: skip
    at = launch.plan.assignments
    assert not launch.job.updates_together
    assert launch.job.engine_sleeps
    assert launch.job.entropy
    assert launch.job.packed
    assert at[S.ACTOR_TRAIN].layout == Layout(dp=4, cp=2, sharding="zero2")
    assert at[S.ACTOR_TRAIN].knobs == Knobs(token_budget_tokens=16192, offload_optimizer=True)
    assert at[S.CRITIC_VALUES].knobs.token_budget_tokens == 32384
    # DeepSpeed offloads parameters under ZeRO-3 only, and never those of a model that trains.
    assert not at[S.REF_LOGPROB].knobs.offload_params
    assert not at[S.ACTOR_TRAIN].knobs.offload_params
    assert (launch.prompt_tokens, launch.response_tokens) == (1024, 8192)
    sharded = read_launch(today("--ref.offload", "--ds.zero_stage", "3")).plan.assignments
    assert sharded[S.REF_LOGPROB].knobs.offload_params
    assert not sharded[S.REWARD_SCORE].knobs.offload_params


def test_openrlhf_placements() -> None:
    words = [w for w in openrlhf(512) if w != "--colocate_all_models"]
    words += ["--colocate_actor_ref", "--critic_num_gpus_per_node", "4",
              "--reward_num_gpus_per_node", "4", "--colocate_critic_reward"]  # fmt: skip
    at = read_launch(words).plan.assignments
    assert at[S.ACTOR_TRAIN].devices == at[S.REF_LOGPROB].devices == tuple(range(8))
    assert at[S.CRITIC_TRAIN].devices == at[S.REWARD_SCORE].devices == tuple(range(8, 12))
    assert at[S.ACTOR_GENERATE].devices == tuple(range(12, 20))


def test_a_script_is_read_with_its_variables(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "set -x\nMODEL=Qwen/Qwen2.5-7B-Instruct\npython3 -m verl.trainer.main_ppo \\\n"
        "    actor_rollout_ref.model.path=$MODEL \\\n    data.max_response_length=4096 $@\n"
    )
    words = words_of_script(script)
    assert "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct" in words
    assert "data.max_response_length=4096" in words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.train_batch_size=8"], "actor_rollout_ref.model.path is missing"),
        (verl("Qwen/Qwen2.5-7B"), "micro_batch_size_per_gpu is missing"),
        (verl("nobody/unknown-9b"), "--model NAME"),
        (verl("Qwen/Qwen2.5-7B", *SMALL, "trainer.nnodes=$N"), "trainer.nnodes=.* shell variable"),
        (verl("Qwen/Qwen2.5-7B", *SMALL, "trainer.nnodes=two"), "not a whole number"),
        (["openrlhf.cli.train_ppo_ray", "--zero_stage", "3"], "--pretrain is missing"),
        (openrlhf(512, "--zero_stage", "1"), "--zero_stage 1"),
        (today("--zero_stage", "3"), "--ds.zero_stage since OpenRLHF 0.10"),
        (today("--ds.zero_stagee", "3"), "did you mean --ds.zero_stage"),
        (today("--ds.lora.rank", "8"), "--ds.lora.rank: adapters"),
        (today("--vllm.tensor_parallel_size=2"), "--vllm.num_engines .* = 16: under"),
        (today("--ref.num_gpus_per_node", "4"), "ref on 4 GPUs cannot share those of actor"),
        (today("--train.micro_batch_size", "3"), "must be a multiple of"),
    ],
)
def test_the_setting_at_fault_is_named(words: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_launch(words)


WORK = WorkloadSpec(
    256, LengthDistribution.fixed(512), LengthDistribution.lognormal(512, 0.6, max_tokens=1024), 5,
    64,
)  # fmt: skip


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_verl_overrides_read_back_as_the_plan(backend: str) -> None:
    job = JobSpec(read_model("qwen2.5-7b"), backend=backend)
    found = plan(job, cluster_of("h100", 8), WORK).plan
    words = verl("Qwen/Qwen2.5-7B-Instruct", *launch_flags(found, job))
    again = read_launch(words)
    for stage in (S.ACTOR_TRAIN, S.REF_LOGPROB, S.ACTOR_GENERATE):
        assert again.plan.assignments[stage].layout == found.assignments[stage].layout, stage
    assert again.plan.assignments[S.ACTOR_TRAIN] == found.assignments[S.ACTOR_TRAIN]


def ppo_job(**more: object) -> JobSpec:
    value = read_model("llama3-8b", value_head=True)
    return JobSpec(
        read_model("llama3-8b"), algorithm="ppo", critic=value, reward=value, backend="deepspeed",
        entropy=False, **more,  # type: ignore[arg-type]
    )  # fmt: skip


LONG = WorkloadSpec(
    256, LengthDistribution.fixed(512),
    LengthDistribution.lognormal(9000, 0.4, max_tokens=24576), 5, 64,
)  # fmt: skip


@pytest.mark.parametrize("work", [WORK, LONG])
@pytest.mark.parametrize("gpus", [8, 16, 24])
@pytest.mark.parametrize("cpu_adam", [False, True])
def test_openrlhf_flags_read_back_as_the_plan(
    gpus: int, cpu_adam: bool, work: WorkloadSpec
) -> None:
    """All plans found, the alternatives too, are placements and settings of one command."""
    job = ppo_job(cpu_adam=cpu_adam)
    made = plan(job, cluster_of("h100", gpus), work)
    for found in (made.plan, *(other for other, _ in made.alternatives)):
        words = [w for flag in openrlhf_flags(found, job) for w in flag.split()]
        assert {w[2:] for w in words if w.startswith("--")} <= OPTIONS
        base = ["--actor.model_name_or_path", "llama3-8b"]
        base += ["--reward.model_name_or_path", "llama3-8b", "--train.batch_size", "320"]
        again = read_launch([*base, *words])
        assert (again.job.cpu_adam, again.job.packed) == (cpu_adam, True)
        apart = (
            found.assignments[S.ACTOR_TRAIN].devices != found.assignments[S.CRITIC_TRAIN].devices
        )
        assert again.job.updates_together == apart
        for stage in found.assignments:
            got, wanted = again.plan.assignments[stage], found.assignments[stage]
            assert len(got.devices) == len(wanted.devices)
            assert (got.layout.tp, got.layout.cp, got.layout.dp) == (
                wanted.layout.tp, wanted.layout.cp, wanted.layout.dp,
            ), stage  # fmt: skip
            assert (got.layout.sharding == "zero3") == (wanted.layout.sharding == "zero3")
            if stage in (S.ACTOR_TRAIN, S.CRITIC_TRAIN):
                sleeps = wanted.knobs.offload_optimizer or again.job.cpu_adam
                assert dataclasses.replace(got.knobs, offload_optimizer=sleeps) == (
                    dataclasses.replace(wanted.knobs, offload_optimizer=sleeps)
                )
            for other in found.assignments:
                shared = wanted.devices == found.assignments[other].devices
                assert (got.devices == again.plan.assignments[other].devices) == shared


def test_openrlhf_flags_keep_the_moving_average() -> None:
    job = ppo_job(average=True)
    assert "--train.enable_ema" in openrlhf_flags(plan(job, cluster_of("h100", 8), WORK).plan, job)


def test_openrlhf_has_the_options_that_are_read_and_written() -> None:
    assert set(OLD_NAMES.values()) <= OPTIONS
    source = Path(openrlhf_launch.__file__).read_text(encoding="utf-8")
    read = set(re.findall(r'at\.\w+\(\s*"([a-z0-9_.]+)"', source))
    assert {name for name in read if "." in name} <= OPTIONS
    assert len(read) > 30


def test_the_options_are_those_of_the_installed_release() -> None:
    """Its parser's source, read without importing it: the import needs CUDA, Ray and vLLM."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("openrlhf is not installed here")
    if importlib.metadata.version("openrlhf") != VERSION:
        pytest.skip(f"openrlhf is not {VERSION}")
    source = Path(spec.submodule_search_locations[0]) / "cli" / "train_ppo_ray.py"
    assert parser_options(source.read_text(encoding="utf-8")) == OPTIONS
