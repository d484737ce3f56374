"""verl's Hydra overrides as a `Launch`.

Defaults are those of verl 0.9.1's `ppo_trainer.yaml`; a setting that is not named has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nereus_plugins.cost.job import JobSpec
from nereus_plugins.spec import Assignment, GlobalPlan, Knobs, Layout, ModelStage, SpecError

from .launch import Launch, model_named, whole_number

S = ModelStage
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"


class Overrides:
    """`key=value` words, by key; later ones win."""

    def __init__(self, words: Sequence[str]) -> None:
        self.values: dict[str, str] = {}
        for word in words:
            match = re.fullmatch(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL)
            if match:
                self.values[match[1]] = match[2].strip("\"'")

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if "$" in value:
            raise SpecError(f"{key}={value} holds a shell variable: give its value")
        return value

    def whole(self, key: str, default: int, *, least: int = 1) -> int:
        value = self.optional(key)
        if value is None:
            return default
        if value < least:
            raise SpecError(f"{key}={value} must be at least {least}")
        return value

    def optional(self, key: str) -> int | None:
        value = self.text(key, "null")
        if value.lower() in ("null", "none"):
            return None
        return whole_number(value, key, "=")

    def number(self, key: str, default: float) -> float:
        value = self.text(key, str(default))
        try:
            return float(value)
        except ValueError:
            raise SpecError(f"{key}={value} is not a number") from None

    def flag(self, key: str, default: bool) -> bool:
        value = self.text(key, str(default)).lower()
        if value not in ("true", "false"):
            raise SpecError(f"{key}={value} is not True or False")
        return value == "true"


def read(words: Sequence[str], model: str | None, critic: str | None) -> Launch:
    """The launch of verl's PPO trainer; see `read_launch`."""
    at = Overrides(words)
    path = at.text("actor_rollout_ref.model.path", "")
    if not path and model is None:
        raise SpecError("actor_rollout_ref.model.path is missing")
    per_node, nodes = at.whole("trainer.n_gpus_per_node", 8), at.whole("trainer.nnodes", 1)
    gpus = per_node * nodes
    engine = at.text("model_engine", "dp")
    if engine not in ("dp", "megatron"):
        raise SpecError(f"model_engine={engine} is not modelled; dp (FSDP) and megatron are")
    megatron = (
        engine == "megatron"
        or at.text(f"{_ACTOR}.strategy", "fsdp") == "megatron"
        or any("ppo_megatron_trainer" in word for word in words)  # as older releases name it
    )
    # verl: a critic where the advantage needs values, a reference where KL is used.
    ppo = at.text("algorithm.adv_estimator", "gae") == "gae"
    reward_path = at.text("reward_model.model.path", at.text("reward.reward_model.model_path", ""))
    scored = at.flag("reward_model.enable", False) or at.flag("reward.reward_model.enable", False)
    job = JobSpec(
        model_named(path, model),
        algorithm="ppo" if ppo else "grpo",
        critic=model_named(at.text("critic.model.path", path), critic or model, value_head=True)
        if ppo
        else None,
        reward=model_named(reward_path, None, value_head=True) if scored else None,
        reference=at.flag(f"{_ACTOR}.use_kl_loss", False)
        or at.flag("algorithm.use_kl_in_reward", False),
        entropy=at.number(f"{_ACTOR}.entropy_coeff", 0.0) != 0.0
        or at.flag(f"{_ACTOR}.calculate_entropy", False),
        backend="megatron" if megatron else "fsdp",
        packed=at.flag("actor_rollout_ref.model.use_remove_padding", True),
        rollout_max_sequences=at.whole(f"{_ROLLOUT}.max_num_seqs", 1024),
    )
    dynamic = at.flag(f"{_ACTOR}.use_dynamic_bsz", False)
    budget = at.whole(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384)
    assignments: dict[ModelStage, Assignment] = {}
    for stage in job.stages():
        if stage is S.ACTOR_GENERATE:
            tp = at.whole(f"{_ROLLOUT}.tensor_model_parallel_size", 2)
            if gpus % tp:
                raise SpecError(
                    f"{_ROLLOUT}.tensor_model_parallel_size={tp} does not divide {gpus} GPUs"
                )
            fraction = at.number(f"{_ROLLOUT}.gpu_memory_utilization", 0.5)
            assignments[stage] = Assignment(
                Layout(tp=tp, dp=gpus // tp), Knobs(rollout_memory_fraction=fraction)
            )
            continue
        section = {"actor": _ACTOR, "critic": "critic", "ref": _REF}.get(stage.model, _REF)
        trains = stage.model in ("actor", "critic")
        if trains:
            micro = at.optional(f"{section}.ppo_micro_batch_size_per_gpu")
            own_budget = at.whole(
                f"{section}.ppo_max_token_len_per_gpu", budget if section == _ACTOR else 2 * budget
            )
            own_dynamic = at.flag(f"{section}.use_dynamic_bsz", dynamic)
        else:
            micro = at.optional(f"{section}.log_prob_micro_batch_size_per_gpu")
            own_budget = at.whole(f"{section}.log_prob_max_token_len_per_gpu", budget)
            own_dynamic = at.flag(f"{section}.log_prob_use_dynamic_bsz", dynamic)
        if not own_dynamic and micro is None:
            kind = "ppo" if trains else "log_prob"
            raise SpecError(
                f"{section}.{kind}_micro_batch_size_per_gpu is missing, and use_dynamic_bsz is "
                "False: set one of them"
            )
        assignments[stage] = Assignment(
            _layout(at, section, megatron, gpus),
            Knobs(
                micro_batch=None if own_dynamic else micro,
                token_budget_tokens=own_budget if own_dynamic else None,
                recompute=_recompute(at, section, megatron) if trains else "none",
                # verl keeps an FSDP model that only reads in host memory, whatever is set.
                offload_params=(not trains and not megatron)
                or _engine_flag(at, section, megatron, "param_offload"),
                offload_optimizer=trains
                and _engine_flag(at, section, megatron, "optimizer_offload"),
            ),
        )
    prompts = at.whole("data.train_batch_size", 1024)
    return Launch(
        framework="verl",
        job=job,
        plan=GlobalPlan(assignments, name="launch command"),
        gpus=gpus,
        gpus_per_node=per_node,
        prompts=prompts,
        samples=at.whole(f"{_ROLLOUT}.n", 1),
        mini_batch_prompts=at.whole(f"{_ACTOR}.ppo_mini_batch_size", min(256, prompts)),
        prompt_tokens=at.whole("data.max_prompt_length", 512),
        response_tokens=at.whole("data.max_response_length", 512),
        response_setting="data.max_response_length",
        settings=_settings(megatron, ppo),
    )


def _engine(section: str, megatron: bool) -> str:
    return f"{section}.megatron" if megatron else f"{section}.fsdp_config"


def _engine_flag(at: Overrides, section: str, megatron: bool, name: str) -> bool:
    if not megatron and section == "critic":  # the critic's engine lies under its model
        nested = at.flag(f"critic.model.fsdp_config.{name}", False)
        return at.flag(f"critic.fsdp.{name}", nested)
    return at.flag(f"{_engine(section, megatron)}.{name}", False)


def _layout(at: Overrides, section: str, megatron: bool, gpus: int) -> Layout:
    if not megatron:
        inherits = at.whole(f"{_ACTOR}.ulysses_sequence_parallel_size", 1)
        ulysses = at.whole(
            f"{section}.ulysses_sequence_parallel_size", 1 if section == "critic" else inherits
        )
        if gpus % ulysses:
            raise SpecError(
                f"{section}.ulysses_sequence_parallel_size={ulysses} does not divide {gpus} GPUs"
            )
        size = at.whole(f"{section}.fsdp_config.fsdp_size", -1, least=-1)
        hybrid = 0 < size < gpus
        return Layout(
            dp=gpus // ulysses,
            ulysses=ulysses,
            sharding="hsdp" if hybrid else "fsdp",
            shard_size=size if hybrid else None,
        )
    engine, actor = _engine(section, megatron), _engine(_ACTOR, megatron)

    def size_of(name: str) -> int:
        # The reference has the actor's sizes where it names none of its own; null is one.
        where = engine if section == "critic" or f"{engine}.{name}" in at.values else actor
        return at.whole(f"{where}.{name}", 1)

    tp, pp = size_of("tensor_model_parallel_size"), size_of("pipeline_model_parallel_size")
    cp, ep = size_of("context_parallel_size"), size_of("expert_model_parallel_size")
    if gpus % (tp * pp * cp):
        raise SpecError(f"{engine}: tp*pp*cp = {tp * pp * cp} does not divide {gpus} GPUs")
    return Layout(
        tp=tp,
        pp=pp,
        dp=gpus // (tp * pp * cp),
        cp=cp,
        ep=ep,
        vpp=size_of("virtual_pipeline_model_parallel_size"),
        sequence_parallel=tp > 1,
        sharding="zero1",
    )


def _recompute(at: Overrides, section: str, megatron: bool) -> str:
    if megatron:
        granularity = at.text(
            f"{section}.megatron.override_transformer_config.recompute_granularity", "null"
        )
        return granularity if granularity in ("full", "selective") else "none"
    model = "critic.model" if section == "critic" else "actor_rollout_ref.model"
    return "full" if at.flag(f"{model}.enable_gradient_checkpointing", True) else "none"


def _settings(megatron: bool, critic: bool) -> dict[str, tuple[str, ...]]:
    sections = (_ACTOR, "critic") if critic else (_ACTOR,)

    def engines(name: str) -> tuple[str, ...]:
        out = []
        for section in sections:
            engine = _engine(section, megatron)
            if section == "critic" and not megatron:
                engine = "critic.fsdp"
            out.append(f"{engine}.{name}")
        return tuple(out)

    models = ("actor_rollout_ref.model", "critic.model")[: len(sections)]
    return {
        "token_budget_tokens": tuple(f"{s}.ppo_max_token_len_per_gpu" for s in sections),
        "micro_batch": tuple(f"{s}.ppo_micro_batch_size_per_gpu" for s in sections),
        "recompute": engines("override_transformer_config.recompute_granularity")
        if megatron
        else tuple(f"{model}.enable_gradient_checkpointing" for model in models),
        "offload_params": engines("param_offload"),
        "offload_optimizer": engines("optimizer_offload"),
        "rollout_memory_fraction": (f"{_ROLLOUT}.gpu_memory_utilization",),
        "rollout_tp": (f"{_ROLLOUT}.tensor_model_parallel_size",),
    }
