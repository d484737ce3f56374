"""The job whose plans are estimated: models, algorithm, and the software that runs them."""

from __future__ import annotations

import dataclasses

from nereus_plugins.spec import ModelSpec, ModelStage, Record, SpecError
from nereus_plugins.spec.record import require, require_bool, require_choice, require_int

from .software import Software

ALGORITHMS = ("ppo", "grpo", "sft")
BACKENDS = ("megatron", "fsdp", "deepspeed")
# Assumed: tokens of the busiest expert-parallel rank over the mean, for routers of released models
# on real text, without the balancing loss of pre-training.
EXPERT_IMBALANCE = 1.5


@dataclasses.dataclass(frozen=True)
class JobSpec(Record):
    """A post-training job (or plain fine-tuning).

    Attributes:
        actor: the policy.
        algorithm: "ppo" (critic, values), "grpo" (and its like: no critic), "sft" (one model).
        critic: value model; "ppo" needs one.
        reward: reward model; None where a function scores.
        reference: whether a frozen copy of the actor gives log-probabilities (KL penalty or loss).
        old_logprob: whether the training engine recomputes the rollout's log-probabilities.
        entropy: whether the update computes the entropy of every token (more bytes per logit).
        backend: training engine: "megatron", "fsdp" or "deepspeed" (ZeRO).
        attention: training attention kernel: "fa2", "fa3" or "cudnn".
        compiled: whether layers run compiled or with fused kernels (Liger, TransformerEngine).
        fp8: linear layers of training in fp8.
        packed: sequences packed, no padding (verl's remove_padding, OpenRLHF's packing_samples).
        grad_bytes: bytes of a gradient as kept and reduced; None as the engine does it by itself:
            2 for DeepSpeed, which keeps the model's dtype, 4 for the others.
        cpu_adam: DeepSpeed's optimizer offload: state lies, and the update runs, on the host.
        average: a moving average of the actor's weights is kept beside them (OpenRLHF's
            --train.enable_ema).
        engine_sleeps: where rollout shares GPUs, its engine gives its memory back between
            generations (always so in verl; OpenRLHF's --vllm.enable_sleep).
        updates_together: where actor and critic share GPUs, they update at the same time
            (OpenRLHF without --ds.enable_sleep).
        rollout_max_sequences: sequences an engine replica decodes at once at most.
        prefix_caching: the engine prefills a prompt once for all its samples.
    """

    actor: ModelSpec
    algorithm: str = "grpo"
    critic: ModelSpec | None = None
    reward: ModelSpec | None = None
    reference: bool = True
    old_logprob: bool = True
    entropy: bool = True
    backend: str = "fsdp"
    attention: str = "fa2"
    compiled: bool = False
    fp8: bool = False
    packed: bool = True
    grad_bytes: int | None = None
    cpu_adam: bool = False
    average: bool = False
    engine_sleeps: bool = True
    updates_together: bool = False
    rollout_max_sequences: int = 1024
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        require_choice("JobSpec", "algorithm", self.algorithm, ALGORITHMS)
        require_choice("JobSpec", "backend", self.backend, BACKENDS)
        require_choice("JobSpec", "attention", self.attention, ("fa2", "fa3", "cudnn"))
        for name in ("reference", "old_logprob", "entropy", "compiled", "fp8", "packed",
                     "prefix_caching", "cpu_adam", "average",
                     "engine_sleeps", "updates_together"):  # fmt: skip
            require_bool("JobSpec", name, getattr(self, name))
        require_int("JobSpec", "rollout_max_sequences", self.rollout_max_sequences)
        require(self.grad_bytes in (None, 2, 4), "JobSpec.grad_bytes must be 2, 4 or null")
        require(
            not self.cpu_adam or self.backend == "deepspeed",
            f"JobSpec.cpu_adam is DeepSpeed's: backend={self.backend} has none, set it to false",
        )
        require(
            not self.average or self.backend == "deepspeed",
            f"JobSpec.average is OpenRLHF's: backend={self.backend} has none, set it to false",
        )
        require(
            (self.critic is not None) == (self.algorithm == "ppo"),
            f"algorithm={self.algorithm} "
            + (
                "needs a critic" if self.algorithm == "ppo" else "has no critic: set critic to null"
            ),
        )

    def model_of(self, stage: ModelStage) -> ModelSpec:
        """The model that runs in a stage; `SpecError` if the job has none there."""
        model = {
            "actor": self.actor,
            "ref": self.actor if self.reference else None,
            "critic": self.critic,
            "reward": self.reward,
        }[stage.model]
        if model is None:
            raise SpecError(f"the plan assigns {stage}, and the job has no {stage.model} model")
        return model

    def stages(self) -> tuple[ModelStage, ...]:
        """The stages of one iteration, in the order they run."""
        s = ModelStage
        if self.algorithm == "sft":
            return (s.ACTOR_TRAIN,)
        out = [s.ACTOR_GENERATE]
        if self.reward is not None:
            out.append(s.REWARD_SCORE)
        if self.reference:
            out.append(s.REF_LOGPROB)
        if self.critic is not None:
            out += [s.CRITIC_VALUES, s.CRITIC_TRAIN]
        return (*out, s.ACTOR_TRAIN)

    def software(self, stage: ModelStage) -> Software:
        """The training stack as the cost model counts it."""
        megatron = self.backend == "megatron"
        if self.algorithm == "sft":
            loss = "vocab_parallel" if megatron else "eager"
        elif self.backend == "deepspeed":
            # Every update computes the entropy, or none does.
            loss = "fp32_rl_entropy" if self.entropy else "fp32_rl"
        else:
            loss = "rl_entropy" if self.entropy and stage is ModelStage.ACTOR_TRAIN else "rl"
        grad_bytes = float(self.grad_bytes or (2 if self.backend == "deepspeed" else 4))
        return Software(
            name=f"{self.backend}",
            backend="fsdp" if self.backend == "fsdp" else self.backend,
            attention=self.attention,
            elementwise="fused" if megatron or self.compiled else "eager",
            loss=loss,
            fp8=self.fp8,
            grad_bytes=grad_bytes,
            reduce_bytes=grad_bytes,
            cpu_adam=self.cpu_adam,
            average=self.average and stage is ModelStage.ACTOR_TRAIN,
            expert_imbalance=EXPERT_IMBALANCE,
            wgrad_accumulates=megatron,
            host_forward_s=2.0e-3 if megatron else 1.0e-3,
            host_backward_s=3.0e-3 if megatron else 1.5e-3,
            expandable_segments=False,
        )
