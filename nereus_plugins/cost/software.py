"""What the training software does that changes time or memory: kernels, dtypes, loss, overlap.

`overhead` is the fitted number of a stack: measured over predicted compute time on its calibration
row(s), named in `overhead_from`. 1.0 where nothing was fitted.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Software:
    """A training stack.

    Attributes:
        name: for reports.
        backend: "megatron", "fsdp" (FSDP1 and FSDP2) or "deepspeed".
        attention: kernel: "fa1", "fa2", "fa3", "cudnn" (see kernels.py), or "unfused" (scores
            and probabilities are written out).
        elementwise: "fused" (TransformerEngine, fused kernels), "compiled" (torch.compile) or
            "eager".
        loss: how logits are held: "eager" (fp32 copies), "copied" (the same, shifted first),
            "fused" or "vocab_parallel" (Megatron's two), "inplace" (flash-attn's), "chunked" (never
            whole), "rl" or "rl_entropy" (log-probabilities of the tokens taken, as verl),
            "fp32_rl" or "fp32_rl_entropy" (the same of fp32 logits, as OpenRLHF).
        fp8: linear layers in fp8.
        param_bytes: bytes of a parameter as gathered and multiplied.
        grad_bytes: bytes of a gradient as kept between micro-batches.
        reduce_bytes: bytes of a gradient as reduced.
        master_bytes: master copy (0 where parameters are their own masters; FSDP's sharded
            parameters in fp32 are masters).
        moment_bytes: both Adam moments.
        lora_rank: rank of trained adapters; 0 trains all weights.
        overlap_grad_reduce, overlap_param_gather: Megatron's overlap of data-parallel
            communication with compute.
        async_tp: tensor-parallel communication pipelined with the GEMMs around it.
        context_parallel: "ring" (keys and values pass from rank to rank while attention runs, as
            TransformerEngine) or "gathered" (torch's context_parallel as torchtitan uses it: heads
            are repeated to the queries' number before, gathered while the first part of attention
            runs, and their fp32 gradients passed on step by step).
        dispatch: of tokens to experts: "alltoall" (every copy) or "deepep" (one copy a node).
        expert_imbalance: tokens of the busiest expert-parallel rank over the mean; 1 where a
            benchmark forces balance.
        wgrad_accumulates: weight gradients are added in fp32 by the GEMM (Megatron).
        host_forward_s, host_backward_s: time the host needs to launch one layer's kernels; the
            floor of a layer's time.
        fixed_s: once a step: data, logging, synchronisation.
        cpu_adam: DeepSpeed's optimizer offload: state lies, and the update runs, on the host.
        average: a moving average of the weights is kept, in their dtype.
        expandable_segments: PyTorch's allocator option; less fragmentation.
        overhead: fitted factor on compute.
        overhead_from: the rows it was fitted on.
    """

    name: str
    backend: str = "megatron"
    attention: str = "fa2"
    elementwise: str = "fused"
    loss: str = "fused"
    fp8: bool = False
    param_bytes: float = 2.0
    grad_bytes: float = 4.0
    reduce_bytes: float = 4.0
    master_bytes: float = 4.0
    moment_bytes: float = 8.0
    lora_rank: int = 0
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    async_tp: bool = False
    context_parallel: str = "ring"
    dispatch: str = "alltoall"
    expert_imbalance: float = 1.0
    wgrad_accumulates: bool = True
    host_forward_s: float = 2.0e-3
    host_backward_s: float = 3.0e-3
    fixed_s: float = 5e-3
    cpu_adam: bool = False
    average: bool = False
    expandable_segments: bool = False
    overhead: float = 1.0
    overhead_from: str = ""


MEGATRON = Software(name="Megatron-LM, TransformerEngine", attention="fa3")
FSDP2 = Software(
    name="FSDP2, Hugging Face model",
    backend="fsdp",
    attention="fa2",
    elementwise="eager",
    loss="eager",
    reduce_bytes=4.0,
    wgrad_accumulates=False,
)
