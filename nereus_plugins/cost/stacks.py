"""Training stacks of the public tables, as `Software`: what is known of them, and what was fitted.

A planner knows these facts of its own stack. Numbers marked "fitted" come from the rows named with
them, through `benchmarks/cost_accuracy.py`; nothing else in the cost model is fitted but
`hardware.GPU.sustained`, `step.CONTENTION` and the stated kernel factors.
"""

from __future__ import annotations

import dataclasses

from nereus_plugins.spec import Assignment, ModelStage

from .software import Software


@dataclasses.dataclass(frozen=True)
class FlatFactor:
    """The same factor on every stage's seconds: a calibration of one measured iteration."""

    factor: float = 1.0

    def seconds(self, stage: ModelStage, assignment: Assignment, predicted_s: float) -> float:
        return self.factor * predicted_s

    def bytes(self, stage: ModelStage, assignment: Assignment, predicted_bytes: float) -> float:
        return predicted_bytes


# fitted: one row, NeMo-RL v0.5, Qwen3-32B, on policy, 32 H100, bf16: data movement, offload and
# logging of its driver, that no stage's formula has.
NEMO_RL = FlatFactor(1.22)

# Mean attended length over the packed length in prime-rl's generated data (sequences of random
# length packed to seq_len); 1 would be one sequence.
PRIME_RL_ATTENDED = 0.67


def llm_foundry(*, pure: bool, fp8: bool) -> Software:
    """Composer with FSDP1, 2023: Triton flash attention, flash-attn's in-place cross-entropy
    (its configurations' `loss_fn: fused_crossentropy`)."""
    return Software(
        name="llm-foundry 2023",
        backend="fsdp",
        attention="fa1",
        elementwise="eager",
        loss="inplace",
        fp8=fp8,
        master_bytes=2.0 if pure else 4.0,
        moment_bytes=4.0 if pure else 8.0,
        grad_bytes=2.0 if pure else 4.0,
        reduce_bytes=2.0 if pure else 4.0,
        wgrad_accumulates=False,
        host_forward_s=1.0e-3,
        host_backward_s=1.5e-3,
    )


def torchtitan(*, compiled: bool, fp8: bool, async_tp: bool) -> Software:
    """torchtitan, December 2024: FSDP2, PyTorch SDPA (FA2), fp32 reduction."""
    return Software(
        name="torchtitan 2024-12",
        backend="fsdp",
        attention="fa2",
        elementwise="compiled" if compiled else "eager",
        loss="eager",
        fp8=fp8,
        param_bytes=1.0 if fp8 else 2.0,
        reduce_bytes=4.0,
        async_tp=async_tp,
        context_parallel="gathered",
        wgrad_accumulates=False,
        host_forward_s=1.0e-3,
        host_backward_s=1.5e-3,
        expandable_segments=True,
    )


def prime_rl(*, rl: bool, lora_rank: int, attention: str) -> Software:
    """prime-rl, January 2026: FSDP2, Hugging Face layers; its RL loss makes logits in chunks."""
    return Software(
        name="prime-rl 2026-01",
        backend="fsdp",
        attention=attention,
        elementwise="eager",
        loss="chunked" if rl else "copied",
        lora_rank=lora_rank,
        overhead=1.06,
        overhead_from="prime_rl, qwen3-4b on 8 GPUs, rl, full, 16384 tokens",
        wgrad_accumulates=False,
        host_forward_s=1.0e-3,
        host_backward_s=1.5e-3,
        expandable_segments=True,
    )


def simumax(*, fused_loss: bool, fp8: bool) -> Software:
    """Megatron-LM of 2025 on B200, no data-parallel overlap."""
    return Software(
        name="Megatron-LM 2025 (SimuMax)",
        attention="cudnn",
        loss="fused" if fused_loss else "eager",
        fp8=fp8,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )


def megatron_bridge(*, fp8: bool, lora_rank: int) -> Software:
    """Megatron-Bridge in NeMo containers 25.09 to 26.06: all overlaps on."""
    return Software(
        name="Megatron-Bridge",
        attention="cudnn",
        fp8=fp8,
        lora_rank=lora_rank,
        async_tp=True,
        dispatch="deepep",
        host_forward_s=0.6e-3,
        host_backward_s=0.9e-3,
    )


def megatron_lm_tests(
    *, unfused_attention: bool, fp8: bool, overlap_reduce: bool, overlap_gather: bool
) -> Software:
    """Megatron-LM's functional tests, mostly launch-bound toys."""
    return Software(
        name="Megatron-LM tests",
        attention="unfused" if unfused_attention else "cudnn",
        loss="vocab_parallel",
        fp8=fp8,
        fixed_s=15e-3,
        overlap_grad_reduce=overlap_reduce,
        overlap_param_gather=overlap_gather,
    )
