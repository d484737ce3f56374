"""Launch commands read and judged; plans written as flags and read back."""

import json
from pathlib import Path

import pytest

from nereus_plugins.cost.cli import read_model
from nereus_plugins.cost.explain import cluster_of
from nereus_plugins.cost.job import JobSpec
from nereus_plugins.planner import plan
from nereus_plugins.planner.check import main
from nereus_plugins.planner.flags import launch_flags, openrlhf_flags
from nereus_plugins.planner.launch import read_launch, words_of_script
from nereus_plugins.spec import LengthDistribution, ModelStage, SpecError, WorkloadSpec

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
    changes = [word for change in out["changes"] for word in change["settings"]]
    assert "--deepspeed_enable_sleep" in changes
    asleep = openrlhf(1024, "--deepspeed_enable_sleep", "--ref_reward_offload")
    status, out = check(capsys, "h100", asleep)
    assert status == 0
    until = out["longest_response_tokens"]
    assert 1024 < until < 100_000
    assert check(capsys, "h100", [*asleep, "--generate_max_len", str(until)])[0] == 0
    assert check(capsys, "h100", [*asleep, "--generate_max_len", str(until * 5 // 4)])[0] == 1


def test_the_text_says_what_and_until_when(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gpu", "h100", "--", *openrlhf(1024)]) == 1
    text = capsys.readouterr().out
    assert "does NOT fit" in text
    assert "resting beside" in text or "largest part" in text
    assert "to make it fit" in text


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


def test_openrlhf_flags_read_back_as_the_plan() -> None:
    value = read_model("llama3-8b", value_head=True)
    job = JobSpec(
        read_model("llama3-8b"), algorithm="ppo", critic=value, reward=value, backend="deepspeed"
    )
    found = plan(job, cluster_of("h100", 16), WORK).plan
    words = [w for flag in openrlhf_flags(found, job) for w in flag.split()]
    base = ["--pretrain", "llama3-8b", "--reward_pretrain", "llama3-8b"]
    again = read_launch([*base, *words]).plan
    for stage in (S.ACTOR_TRAIN, S.ACTOR_GENERATE):
        assert again.assignments[stage].layout == found.assignments[stage].layout
        assert len(again.assignments[stage].devices) == len(found.assignments[stage].devices)
    train, planned = again.assignments[S.ACTOR_TRAIN].knobs, found.assignments[S.ACTOR_TRAIN].knobs
    assert train == planned
