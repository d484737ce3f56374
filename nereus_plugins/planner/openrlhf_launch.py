"""OpenRLHF's command line (`openrlhf.cli.train_ppo_ray`) as a `Launch`.

Names, defaults and constraints are those of OpenRLHF 0.11.2 (its `cli/train_ppo_ray.py`,
`trainer/ray/launcher.py`, `trainer/ppo_trainer.py`, `utils/deepspeed/`) and DeepSpeed 0.19.6, which
it pins. Commands in the names of 0.8 and 0.9 (`--zero_stage`), with their defaults, are read too.

What decides memory there and is not obvious: `--ds.enable_sleep` takes optimizer state, master
weights and gradients to the host, never the bf16 weights, and does nothing under
`--ds.adam_offload`; without it actor and critic update at the same time; without
`--vllm.enable_sleep` engines hold their memory all along; `--ref.offload` and `--reward.offload`
act under ZeRO-3 only, since models that only read run at stage 0 otherwise.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from nereus_plugins.cost.job import JobSpec
from nereus_plugins.spec import (
    Assignment,
    GlobalPlan,
    Knobs,
    Layout,
    ModelSpec,
    ModelStage,
    SpecError,
)

from .launch import Launch, model_named, whole_number
from .openrlhf_options import OPTIONS, VERSION

S = ModelStage

# Names of 0.8 and 0.9, and what they are called since 0.10.
OLD_NAMES = {
    "adam_offload": "ds.adam_offload",
    "advantage_estimator": "algo.advantage.estimator",
    "agent_func_path": "train.agent_func_path",
    "async_train": "train.async_enable",
    "attn_implementation": "ds.attn_implementation",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_all_models": "train.colocate_all",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "critic_pretrain": "critic.model_name_or_path",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "entropy_loss_coef": "actor.entropy_coef",
    "grad_accum_dtype": "ds.grad_accum_dtype",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "init_kl_coef": "algo.kl.init_coef",
    "load_in_4bit": "ds.load_in_4bit",
    "lora_rank": "ds.lora.rank",
    "max_len": "data.max_len",
    "max_new_tokens": "rollout.max_new_tokens",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "packing_samples": "ds.packing_samples",
    "pretrain": "actor.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "reward_pretrain": "reward.model_name_or_path",
    "ring_attn_size": "ds.ring_attn_size",
    "rollout_batch_size": "rollout.batch_size",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "train_batch_size": "train.batch_size",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "use_liger_kernel": "ds.use_liger_kernel",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "zero_stage": "ds.zero_stage",
    "zpg": "ds.zpg",
    **{
        f"{model}_{count}": f"{model}.{count}"
        for model in ("actor", "critic", "ref", "reward")
        for count in ("num_nodes", "num_gpus_per_node")
    },
}


class Flags:
    """`--name value`, `--name=value` and bare `--name` words, under the names of 0.11.

    Attributes:
        old: whether the command uses the names, and so has the defaults, of 0.8 or 0.9.

    Raises: SpecError where a command in today's names has one that OpenRLHF does not take.
    """

    def __init__(self, words: Sequence[str]) -> None:
        given: dict[str, str | None] = {}
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if not word.startswith("--") or word == "--":
                continue
            name, equals, value = word[2:].partition("=")
            if equals:
                given[name] = value
            elif at < len(words) and not words[at].startswith("--"):
                given[name] = words[at]
                at += 1
            else:
                given[name] = None
        self.old = not any("." in name for name in given)
        self.written: dict[str, str] = {}
        self.values: dict[str, str | None] = {}
        for name, text in given.items():
            if not self.old and name not in OPTIONS:
                raise SpecError(_unknown(name))
            today = OLD_NAMES.get(name, name)
            self.values[today] = text
            self.written[today] = name
        if self.old and "ref_reward_offload" in given:
            self.values["ref.offload"] = self.values["reward.offload"] = None

    def named(self, name: str) -> str:
        """The option as this command's release writes it."""
        if name in self.written:
            return f"--{self.written[name]}"
        if self.old:
            if name in ("ref.offload", "reward.offload"):
                return "--ref_reward_offload"
            return "--" + next((old for old, new in OLD_NAMES.items() if new == name), name)
        return f"--{name}"

    def on(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name) or default
        if "$" in value:
            raise SpecError(f"{self.named(name)} {value} holds a shell variable: give its value")
        return value

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        value = self.text(name, str(default))
        number = whole_number(value, self.named(name), " ")
        if number < least:
            raise SpecError(f"{self.named(name)} {value} must be at least {least}")
        return number

    def number(self, name: str, default: float) -> float:
        value = self.text(name, str(default))
        try:
            return float(value)
        except ValueError:
            raise SpecError(f"{self.named(name)} {value} is not a number") from None


def _unknown(name: str) -> str:
    if name in OLD_NAMES:
        return f"--{name} is --{OLD_NAMES[name]} since OpenRLHF 0.10: the command mixes both names"
    near = difflib.get_close_matches(name, OPTIONS, 1)
    hint = f"; did you mean --{near[0]}?" if near else ""
    return f"OpenRLHF {VERSION} has no option --{name}{hint}"


def read(
    words: Sequence[str], model: str | None, critic: str | None, prompt_tokens: int | None = None
) -> Launch:
    """The launch of OpenRLHF's PPO trainer; see `read_launch`."""
    at = Flags(words)
    pretrain = at.text("actor.model_name_or_path")
    if not pretrain and model is None:
        raise SpecError(f"{at.named('actor.model_name_or_path')} is missing")
    _refuse(at)
    ppo = at.text("algo.advantage.estimator", "gae") == "gae"
    # A model that scores runs in the job only where no URL, agent or function scores instead.
    elsewhere = at.on("reward.remote_url") or at.on("train.agent_func_path")
    reward = "" if elsewhere else at.text("reward.model_name_or_path").split(",")[0]
    value = at.text("critic.model_name_or_path", reward or pretrain)
    dynamic = at.on("train.dynamic_batch_enable")
    ring, tp = at.whole("ds.ring_attn_size", 1), at.whole("ds.tensor_parallel_size", 1)
    job = openrlhf_job(
        model_named(pretrain, model),
        model_named(value, critic or model, value_head=True) if ppo else None,
        model_named(reward, critic or model, value_head=True) if reward else None,
        reference=at.number("algo.kl.init_coef", 0.01) > 0.0,
        # Given at all, 0 too, it is computed.
        entropy=at.on("actor.entropy_coef"),
        attention=at.text("ds.attn_implementation", ""),
        gradients=at.text("ds.grad_accum_dtype", "bf16"),
        compiled=at.on("ds.use_liger_kernel"),
        # Both imply it.
        packed=at.on("ds.packing_samples") or dynamic or ring > 1,
        cpu_adam=at.on("ds.adam_offload"),
        engines_sleep=at.on("vllm.enable_sleep"),
        models_sleep=at.on("ds.enable_sleep"),
        colocate_all=at.on("train.colocate_all"),
        average=at.on("train.enable_ema"),
    )
    groups, total = _groups(at, job)
    zero = at.whole("ds.zero_stage", 2, least=0)
    if zero not in (2, 3):
        raise SpecError(f"{at.named('ds.zero_stage')} {zero}: ZeRO stages 2 and 3 are modelled")
    micro = {"train": at.whole("train.micro_batch_size", 4 if at.old else 1),
             "rollout": at.whole("rollout.micro_batch_size", 8 if at.old else 1)}  # fmt: skip
    train_budget = at.whole("train.max_tokens_per_gpu", 16192)
    budgets = {"train": train_budget,
               "rollout": at.whole("rollout.max_tokens_per_gpu", train_budget)}  # fmt: skip
    assignments: dict[ModelStage, Assignment] = {}
    for stage in job.stages():
        devices = groups["vllm" if stage is S.ACTOR_GENERATE else stage.model]
        if stage is S.ACTOR_GENERATE:
            engine_tp = at.whole("vllm.tensor_parallel_size", 1)
            assignments[stage] = Assignment(
                Layout(tp=engine_tp, dp=len(devices) // engine_tp),
                Knobs(rollout_memory_fraction=at.number("vllm.gpu_memory_utilization", 0.95)),
                devices,
            )
            continue
        if len(devices) % (ring * tp):
            raise SpecError(
                f"{at.named('ds.ring_attn_size')} * {at.named('ds.tensor_parallel_size')} = "
                f"{ring * tp} must divide the {len(devices)} GPUs of the {stage.model} model"
            )
        trains = stage in (S.ACTOR_TRAIN, S.CRITIC_TRAIN)
        reads_only = stage in (S.REF_LOGPROB, S.REWARD_SCORE)
        size = "train" if trains else "rollout"
        # Models that only read are sharded by ZeRO-3, and whole on every GPU otherwise.
        sharding = "zero3" if zero == 3 else "none" if reads_only else "zero2"
        assignments[stage] = Assignment(
            Layout(tp=tp, cp=ring, dp=len(devices) // (ring * tp), sharding=sharding),
            Knobs(
                micro_batch=None if dynamic else micro[size],
                # The budget is of a GPU; a tensor-parallel group fills the budgets of all its GPUs.
                token_budget_tokens=budgets[size] * tp if dynamic else None,
                recompute="full"
                if not reads_only and at.on("actor.gradient_checkpointing_enable")
                else "none",
                offload_params=reads_only and zero == 3 and at.on(f"{stage.model}.offload"),
                offload_optimizer=not reads_only and at.on("ds.enable_sleep"),
            ),
            devices,
        )
    samples = at.whole("rollout.n_samples_per_prompt", 1)
    prompts = at.whole("rollout.batch_size", 1024)
    update = at.whole("train.batch_size", 128)
    ranks = len(groups["actor"]) // (ring * tp)
    if not dynamic and update % (micro["train"] * ranks):
        raise SpecError(
            f"{at.named('train.batch_size')} = {update} must be a multiple of "
            f"{at.named('train.micro_batch_size')} * data-parallel ranks = {micro['train'] * ranks}"
        )
    prompt, response, setting = _lengths(at, prompt_tokens)
    per_node = at.whole("actor.num_gpus_per_node", 8)
    return Launch(
        framework="openrlhf",
        job=job,
        plan=GlobalPlan(assignments, name="launch command"),
        gpus=total,
        gpus_per_node=min(8, total) if total % min(8, total) == 0 else per_node,
        prompts=prompts,
        samples=samples,
        # train.batch_size counts samples.
        mini_batch_prompts=prompts_of_update(update, samples, prompts),
        prompt_tokens=prompt,
        response_tokens=response,
        response_setting=setting,
        settings={
            name: (at.named(option),)
            for name, option in (
                ("token_budget_tokens", "train.max_tokens_per_gpu"),
                ("micro_batch", "train.micro_batch_size"),
                ("recompute", "actor.gradient_checkpointing_enable"),
                ("offload_optimizer", "ds.enable_sleep"),
                ("cpu_adam", "ds.adam_offload"),
                ("zero_stage", "ds.zero_stage"),
                ("engine_sleeps", "vllm.enable_sleep"),
                ("rollout_memory_fraction", "vllm.gpu_memory_utilization"),
                ("rollout_tp", "vllm.tensor_parallel_size"),
            )
        },
    )


def openrlhf_job(
    actor: ModelSpec,
    critic: ModelSpec | None,
    reward: ModelSpec | None,
    *,
    reference: bool,
    entropy: bool,
    attention: str,
    gradients: str,
    compiled: bool,
    packed: bool,
    engines_sleep: bool,
    models_sleep: bool,
    colocate_all: bool,
    average: bool,
    cpu_adam: bool = False,
) -> JobSpec:
    """An OpenRLHF job: its models, and what runs them.

    Args:
        attention: `--ds.attn_implementation`. gradients: `--ds.grad_accum_dtype`.
        compiled: whether it uses liger kernels. engines_sleep, models_sleep: vLLM's, DeepSpeed's.
        average: whether it has `--train.enable_ema`.
    """
    return JobSpec(
        actor,
        algorithm="ppo" if critic else "grpo",
        critic=critic,
        reward=reward,
        reference=reference,
        entropy=entropy,
        backend="deepspeed",
        attention="fa3" if "3" in attention else "fa2",
        compiled=compiled,
        packed=packed,
        grad_bytes=4 if gradients in ("fp32", "float32", "torch.float32") else 2,
        cpu_adam=cpu_adam,
        average=average,
        engine_sleeps=engines_sleep or not colocate_all,
        updates_together=not models_sleep,
    )


def prompts_of_update(update_samples: int, samples: int, prompts: int) -> int:
    """Prompts of one optimizer step.

    `--train.batch_size` counts samples. Where they are not those of whole prompts, or no whole part
    of a rollout, the part that is nearest to as many.

    Args: samples: of a prompt. prompts: of a rollout.
    """
    parts = [part for part in range(1, prompts + 1) if prompts % part == 0]
    return min(parts, key=lambda part: abs(math.log(part * samples / update_samples)))


def _refuse(at: Flags) -> None:
    """What changes bytes or seconds and is not modelled."""
    wrong = []
    if at.whole("ds.lora.rank", 0, least=0) or at.on("ds.load_in_4bit"):
        wrong.append(("ds.lora.rank", "adapters and 4-bit weights"))
    if at.whole("ds.zpg", 1) > 1:
        wrong.append(("ds.zpg", "ZeRO++'s second copy of the weights"))
    for model in ("actor", "critic"):
        if at.text(f"{model}.optim", "adam") != "adam":
            wrong.append((f"{model}.optim", "optimizers other than Adam"))
    for name, what in wrong:
        raise SpecError(f"{at.named(name)}: {what} are not modelled for OpenRLHF")


def _lengths(at: Flags, prompt_tokens: int | None) -> tuple[int, int, str]:
    """Longest prompt and response, and the setting that limits the response.

    Since 0.9 a command limits their sum, and perhaps the response: how long prompts are it does
    not say, so without `--prompt-tokens` half of the sum is assumed.
    """
    if at.on("prompt_max_len") or at.on("generate_max_len"):
        prompt = at.whole("prompt_max_len", 1024)
        return prompt, at.whole("generate_max_len", 1024), "--generate_max_len"
    if at.old and not at.on("data.max_len"):
        return 1024, 1024, "--generate_max_len"
    total = at.whole("data.max_len", 2048)
    new = at.whole("rollout.max_new_tokens", 0, least=0)
    if new:
        prompt = prompt_tokens or max(1, total - new)
        return prompt, min(new, total - prompt), at.named("rollout.max_new_tokens")
    prompt = prompt_tokens or total // 2
    if not prompt < total:
        raise SpecError(f"{at.named('data.max_len')} {total} leaves nothing after the prompt")
    return prompt, total - prompt, f"{at.named('data.max_len')} less the prompt"


def _groups(at: Flags, job: JobSpec) -> tuple[dict[str, tuple[int, ...]], int]:
    """Devices of each model and of the engines, and how many in all.

    Raises: SpecError where models that share GPUs are asked for on different numbers of them.
    """

    def count(name: str) -> int:
        return at.whole(f"{name}.num_nodes", 1) * at.whole(f"{name}.num_gpus_per_node", 8)

    engines = at.whole("vllm.num_engines", 0, least=0) * at.whole("vllm.tensor_parallel_size", 1)
    if engines == 0:
        raise SpecError(
            f"{at.named('vllm.num_engines')} is missing: generation runs on vLLM engines"
        )
    groups: dict[str, tuple[int, ...]] = {}
    total = 0

    def take(number: int) -> tuple[int, ...]:
        nonlocal total
        total += number
        return tuple(range(total - number, total))

    def beside(name: str, other: str) -> tuple[int, ...]:
        if count(name) != count(other):
            raise SpecError(
                f"{at.named(f'{name}.num_gpus_per_node')}: {name} on {count(name)} GPUs cannot "
                f"share those of {other}, which has {count(other)}"
            )
        return groups[other]

    everything = at.on("train.colocate_all")
    groups["actor"] = take(count("actor"))
    if job.reference:
        together = everything or at.on("train.colocate_actor_ref")
        groups["ref"] = beside("ref", "actor") if together else take(count("ref"))
    # A pair of their own takes critic and reward from the others' GPUs, under colocate_all too.
    pair = at.on("train.colocate_critic_reward") and job.critic is not None
    home = groups["actor"] if everything and not pair else None
    for name, there in (("critic", job.critic), ("reward", job.reward)):
        if there is None:
            continue
        if home is not None:
            if count(name) > len(home):
                raise SpecError(
                    f"{at.named(f'{name}.num_gpus_per_node')}: {count(name)} GPUs, and "
                    f"{at.named('train.colocate_all')} gives {name} the actor's {len(home)}"
                )
            groups[name] = home[: count(name)]
        elif pair and name == "reward":
            groups[name] = beside("reward", "critic")
        else:
            groups[name] = take(count(name))
    if everything and not at.on("train.async_enable"):
        if engines != len(groups["actor"]):
            raise SpecError(
                f"{at.named('vllm.num_engines')} * {at.named('vllm.tensor_parallel_size')} = "
                f"{engines}: under {at.named('train.colocate_all')} engines take the actor's "
                f"{len(groups['actor'])} GPUs"
            )
        groups["vllm"] = groups["actor"]
    else:
        groups["vllm"] = take(engines)
    return groups, total
