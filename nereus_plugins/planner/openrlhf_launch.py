"""OpenRLHF's command line (`openrlhf.cli.train_ppo_ray`) as a `Launch`; flags of OpenRLHF 0.8."""

from __future__ import annotations

from collections.abc import Sequence

from nereus_plugins.cost.job import JobSpec
from nereus_plugins.spec import Assignment, GlobalPlan, Knobs, Layout, ModelStage, SpecError

from .launch import Launch, model_named

S = ModelStage


class Flags:
    """`--name value`, `--name=value` and bare `--name` words."""

    def __init__(self, words: Sequence[str]) -> None:
        self.values: dict[str, str | None] = {}
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if not word.startswith("--") or word == "--":
                continue
            name, equals, value = word[2:].partition("=")
            if equals:
                self.values[name] = value
            elif at < len(words) and not words[at].startswith("--"):
                self.values[name] = words[at]
                at += 1
            else:
                self.values[name] = None

    def on(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name) or default
        if "$" in value:
            raise SpecError(f"--{name} {value} holds a shell variable: give its value")
        return value

    def whole(self, name: str, default: int) -> int:
        value = self.text(name, str(default))
        try:
            return int(float(value))
        except ValueError:
            raise SpecError(f"--{name} {value} is not a whole number") from None

    def number(self, name: str, default: float) -> float:
        value = self.text(name, str(default))
        try:
            return float(value)
        except ValueError:
            raise SpecError(f"--{name} {value} is not a number") from None


def read(words: Sequence[str], model: str | None, critic: str | None) -> Launch:
    """The launch of OpenRLHF's PPO trainer; see `read_launch`."""
    at = Flags(words)
    pretrain = at.text("pretrain")
    if not pretrain and model is None:
        raise SpecError("--pretrain is missing")
    ppo = at.text("advantage_estimator", "gae") == "gae"
    # A model that scores runs in the job only where no URL or function scores instead.
    reward = at.text("reward_pretrain") if not at.on("remote_rm_url") else ""
    value = at.text("critic_pretrain", reward or pretrain)
    job = JobSpec(
        model_named(pretrain, model),
        algorithm="ppo" if ppo else "grpo",
        critic=model_named(value, critic or model, value_head=True) if ppo else None,
        reward=model_named(reward, critic or model, value_head=True) if reward else None,
        reference=at.number("init_kl_coef", 0.01) != 0.0,
        entropy=at.number("entropy_loss_coef", 0.0) != 0.0,
        backend="deepspeed",
        packed=at.on("packing_samples"),
    )
    groups, total = _groups(at, job)
    zero = at.whole("zero_stage", 2)
    if zero not in (2, 3):
        raise SpecError(f"--zero_stage {zero}: ZeRO stages 2 and 3 are modelled")
    sleep = at.on("deepspeed_enable_sleep")
    assignments: dict[ModelStage, Assignment] = {}
    for stage in job.stages():
        devices = groups["vllm" if stage is S.ACTOR_GENERATE else stage.model]
        if stage is S.ACTOR_GENERATE:
            tp = at.whole("vllm_tensor_parallel_size", 1)
            assignments[stage] = Assignment(
                Layout(tp=tp, dp=len(devices) // tp),
                Knobs(rollout_memory_fraction=at.number("vllm_gpu_memory_utilization", 0.95)),
                devices,
            )
            continue
        trains = stage.model in ("actor", "critic")
        reads_only = stage in (S.REF_LOGPROB, S.REWARD_SCORE)
        name = "micro_train_batch_size" if trains else "micro_rollout_batch_size"
        packed = "train_max_tokens_per_gpu" if trains else "rollout_max_tokens_per_gpu"
        budget = at.whole(packed, at.whole("train_max_tokens_per_gpu", 16192))
        dynamic = at.on("use_dynamic_batch")
        # Models that only read are sharded by ZeRO-3, and whole on every GPU otherwise.
        sharding = "zero3" if zero == 3 else "none" if reads_only else "zero2"
        assignments[stage] = Assignment(
            Layout(dp=len(devices), sharding=sharding),
            Knobs(
                micro_batch=None if dynamic else at.whole(name, 4 if trains else 8),
                token_budget_tokens=budget if dynamic else None,
                recompute="full" if trains and at.on("gradient_checkpointing") else "none",
                offload_params=at.on("ref_reward_offload") if reads_only else sleep,
                offload_optimizer=trains and at.on("adam_offload"),
            ),
            devices,
        )
    samples = at.whole("n_samples_per_prompt", 1)
    prompts = at.whole("rollout_batch_size", 1024)
    per_node = at.whole("actor_num_gpus_per_node", 8)
    return Launch(
        framework="openrlhf",
        job=job,
        plan=GlobalPlan(assignments, name="launch command"),
        gpus=total,
        gpus_per_node=min(8, total) if total % min(8, total) == 0 else per_node,
        prompts=prompts,
        samples=samples,
        # train_batch_size counts samples.
        mini_batch_prompts=max(1, at.whole("train_batch_size", 128) // samples),
        prompt_tokens=at.whole("prompt_max_len", 1024),
        response_tokens=at.whole("generate_max_len", 1024),
        settings={
            "token_budget_tokens": ("--train_max_tokens_per_gpu",),
            "micro_batch": ("--micro_train_batch_size",),
            "recompute": ("--gradient_checkpointing",),
            "offload_params": ("--deepspeed_enable_sleep",),
            "offload_optimizer": ("--adam_offload",),
            "rollout_memory_fraction": ("--vllm_gpu_memory_utilization",),
            "rollout_tp": ("--vllm_tensor_parallel_size",),
        },
    )


def _groups(at: Flags, job: JobSpec) -> tuple[dict[str, tuple[int, ...]], int]:
    """Devices of each model and of the engines, and how many in all."""

    def count(name: str) -> int:
        return at.whole(f"{name}_num_nodes", 1) * at.whole(f"{name}_num_gpus_per_node", 8)

    engines = at.whole("vllm_num_engines", 0) * at.whole("vllm_tensor_parallel_size", 1)
    if engines == 0:
        raise SpecError("--vllm_num_engines is missing: generation runs on vLLM engines")
    groups: dict[str, tuple[int, ...]] = {}
    total = 0

    def take(number: int) -> tuple[int, ...]:
        nonlocal total
        total += number
        return tuple(range(total - number, total))

    groups["actor"] = take(count("actor"))
    everything = at.on("colocate_all_models")
    models = {"ref": job.reference, "critic": job.critic, "reward": job.reward}
    beside = {"ref": "actor" if everything or at.on("colocate_actor_ref") else "",
              "critic": "actor" if everything else "",
              "reward": "actor" if everything
              else "critic" if at.on("colocate_critic_reward") and job.critic else ""}  # fmt: skip
    for name, there in models.items():
        if there:
            groups[name] = groups[beside[name]] if beside[name] else take(count(name))
    if everything and engines <= len(groups["actor"]):
        groups["vllm"] = groups["actor"][:engines]
    else:
        groups["vllm"] = take(engines)
    return groups, total
