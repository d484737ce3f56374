"""Seconds of one transformer layer and of the head, forward and backward, on one rank."""

from __future__ import annotations

import dataclasses

from .case import Case
from .communication import collective_s
from .kernels import attention_s, gemm_s

# Part of the datasheet's memory bandwidth that streaming kernels reach (copy benchmarks on A100 and
# H100 reach 0.85 to 0.92).
HBM_EFFICIENCY = 0.85


@dataclasses.dataclass(slots=True)
class Seconds:
    """Time by cause. `tp`, `cp`, `ep` are exposed communication; `host` is launching left over."""

    gemm: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    host: float = 0.0

    # Written out: a plan's search adds and scales these some hundred thousand times.
    @property
    def total(self) -> float:
        return (
            self.gemm + self.attention + self.elementwise + self.tp + self.cp + self.ep + self.host
        )

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.gemm + other.gemm,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            self.tp + other.tp,
            self.cp + other.cp,
            self.ep + other.ep,
            self.host + other.host,
        )

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(
            self.gemm * factor,
            self.attention * factor,
            self.elementwise * factor,
            self.tp * factor,
            self.cp * factor,
            self.ep * factor,
            self.host * factor,
        )


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """forward; backward without recomputation; what is computed again in backward."""

    forward: Seconds
    backward: Seconds
    recompute: Seconds


def _mul_s(case: Case, m: float, n: float, k: float, *, low: bool = True) -> float:
    """One product at the rate that lasts under the power cap."""
    if m < 1 or n < 1 or k < 1:
        return 0.0
    raw = gemm_s(case.gpu, round(m), round(n), round(k), fp8=low and case.software.fp8)
    return raw / (case.gpu.sustained * case.gpu.clocks)


def _stream_s(case: Case, nbytes: float) -> float:
    return nbytes / (case.gpu.hbm_bytes_s * HBM_EFFICIENCY)


# Adapters run beside the layer in PyTorch operations: the input is cast for fp32 adapters, the
# adapter's output scaled, cast and added: bytes per input and output element; fitted: prime-rl
# qwen3-0.6b.
ADAPTER_BYTES = {"eager": 16.0, "compiled": 8.0, "fused": 5.0}


def _adapter_bytes(case: Case, count: float) -> float:
    """Bytes an adapter moves per input and output element; experts' run grouped, in bf16."""
    return ADAPTER_BYTES["fused" if count > 1 else case.software.elementwise]


def _linear(case: Case, m: float, gemms: list[tuple[int, int]], count: float = 1.0) -> Seconds:
    """Forward products of `count` copies of these weights on m tokens each, and adapters."""
    out = Seconds(gemm=count * sum(_mul_s(case, m, n, k) for n, k in gemms))
    rank = case.software.lora_rank
    for n, k in gemms if rank else []:
        out.gemm += count * (_mul_s(case, m, rank, k) + _mul_s(case, m, n, rank))
        out.elementwise += count * _stream_s(case, m * _adapter_bytes(case, count) * (n + k))
    if case.software.fp8:
        # Quantise the input: read bf16 for the maximum and again to cast, write both layouts.
        out.elementwise += count * _stream_s(case, 6.0 * m * sum(k for _, k in gemms))
    return out


def _linear_backward(
    case: Case, m: float, gemms: list[tuple[int, int]], count: float = 1.0
) -> Seconds:
    """Input gradients (m, k, n) and weight gradients (n, k, m); adapters train only themselves."""
    out = Seconds(gemm=count * sum(_mul_s(case, m, k, n) for n, k in gemms))
    rank = case.software.lora_rank
    if rank:
        for n, k in gemms:
            out.gemm += 2 * count * (_mul_s(case, m, rank, n) + _mul_s(case, m, k, rank))
            out.elementwise += count * _stream_s(case, m * _adapter_bytes(case, count) * (n + k))
    else:
        out.gemm += count * sum(_mul_s(case, n, k, m) for n, k in gemms)
        if case.software.wgrad_accumulates:
            # The GEMM reads and writes the fp32 gradient instead of writing a bf16 one.
            out.elementwise += count * _stream_s(case, 6.0 * sum(n * k for n, k in gemms))
        elif case.batch.micro_batches > 1:
            out.elementwise += count * _stream_s(case, 6.0 * sum(n * k for n, k in gemms))
    if case.software.fp8:
        out.elementwise += count * _stream_s(case, 6.0 * m * sum(n for n, _ in gemms))
    return out


# Bytes moved per element in forward, (backward), by how elementwise code runs. "fused": one kernel
# reads bf16 inputs and writes bf16 outputs. "eager": what PyTorch's separate kernels move, with the
# fp32 intermediates of RMSNorm (cast, square, mean, scale, cast, weight) and of rotary embedding.
_NORM = {"fused": (4, 6), "compiled": (4, 8), "eager": (36, 60)}
_LAYERNORM = {"fused": (4, 6), "compiled": (4, 6), "eager": (8, 14)}
_RESIDUAL = {"fused": (6, 4), "compiled": (4, 4), "eager": (6, 6)}
_ROTARY = {"fused": (4, 4), "compiled": (6, 6), "eager": (24, 28)}
_GATED = {"fused": (6, 10), "compiled": (6, 10), "eager": (10, 18)}
_PLAIN = {"fused": (4, 6), "compiled": (4, 6), "eager": (4, 6)}


def _elementwise(case: Case, tokens: float, ffn_width: float) -> tuple[float, float]:
    """Bytes that norms, residuals, rotary embedding and activation move: forward, backward.

    `ffn_width` is the width of the activation on this rank, in elements of all tokens over tokens.
    """
    shape, lay, kind = case.shape, case.layout, case.software.elementwise
    m = shape.model
    # Norms and residuals run on the part of the tokens that sequence parallelism leaves here.
    outside = tokens / (lay.tp if lay.sequence_parallel else 1)
    norm = (_LAYERNORM if m.norm == "layernorm" else _NORM)[kind]
    act = (_GATED if m.gated_mlp else _PLAIN)[kind]
    rotated = (m.query_size + m.kv_size) / lay.tp if shape.learned_positions == 0 else 0
    normed = 2 * m.hidden_size * outside + (
        (m.query_size + m.kv_size) / lay.tp * tokens if m.qk_norm else 0.0
    )
    out = []
    for way in (0, 1):
        nbytes = normed * norm[way] + 2 * m.hidden_size * outside * _RESIDUAL[kind][way]
        nbytes += rotated * tokens * _ROTARY[kind][way] + ffn_width * tokens * act[way]
        out.append(nbytes)
    return out[0], out[1]


def _attention(case: Case, backward: bool) -> Seconds:
    """Core attention of a micro-batch and the context-parallel exchange around it."""
    lay, batch = case.layout, case.batch
    cp, ulysses = lay.cp, lay.ulysses
    if case.software.attention == "unfused":
        return Seconds(attention=_unfused_attention_s(case, backward))
    # Zig-zag sharding gives every context-parallel rank the same share of the causal work.
    compute = attention_s(
        case.gpu,
        batch=case.sequences,
        seq=batch.attended,
        heads=case.heads_per_rank,
        head_dim=round((case.shape.qk_head + case.shape.v_head) / 2),
        kernel=case.software.attention,
        backward=backward,
        query_part=1.0 / cp,
    )
    compute /= case.gpu.clocks
    out = Seconds(attention=compute)
    m = case.shape.model
    if cp > 1 and case.software.context_parallel == "gathered":
        # Two bf16 tensors of as many heads as queries; backward gathers them again, and passes
        # their fp32 gradients on in cp steps, one after each part of attention.
        kv = 4.0 * batch.tokens * m.query_size / lay.tp
        wire = collective_s(case.gpu, case.network, "all_gather", case.group("cp"), kv)
        out.cp += max(0.0, wire - compute / cp) + (2.0 * wire if backward else 0.0)
    elif cp > 1:
        # Keys and values go round the ring while attention runs; in backward their gradients too.
        kv = 4.0 * batch.tokens * (m.kv_size / lay.tp if case.shape.mla is None else m.query_size)
        wire = collective_s(case.gpu, case.network, "all_gather", case.group("cp"), kv)
        out.cp += max(0.0, wire * (2.0 if backward else 1.0) - compute * (cp - 1) / cp)
    if ulysses > 1:
        # DeepSpeed-Ulysses: all-to-all of q, k, v before and of the output after attention.
        rows = 2.0 * case.tokens_here(batch.tokens)
        moved = rows * (2 * m.query_size + 2 * m.kv_size) / lay.tp
        out.cp += collective_s(case.gpu, case.network, "alltoall", case.group("cp"), moved)
    return out


def _unfused_attention_s(case: Case, backward: bool) -> float:
    """Scores written out: all of seq^2 multiplied (nothing saved), softmax, dropout streamed."""
    area = case.batch.tokens * case.batch.attended * case.heads_per_rank / case.layout.cp
    flops = 4.0 * area * case.shape.head_dim * (2.0 if backward else 1.0)
    moved = area * (28.0 if backward else 18.0)
    return flops / (0.5 * case.gpu.bf16_flops) + _stream_s(case, moved)


def _tensor_parallel_s(case: Case, tokens: float, collectives: int) -> float:
    """Exposed tensor-parallel collectives of one layer in one direction.

    With sequence parallelism an all-gather and a reduce-scatter for attention and for the MLP
    (Korthikanti et al., arXiv:2205.05198); without, one all-reduce each.
    """
    group = case.group("tp")
    if group.ranks == 1:
        return 0.0
    nbytes = 2.0 * tokens * case.shape.model.hidden_size
    if case.layout.sequence_parallel:
        one = collective_s(case.gpu, case.network, "all_gather", group, nbytes)
        one += collective_s(case.gpu, case.network, "reduce_scatter", group, nbytes)
    else:
        one = collective_s(case.gpu, case.network, "all_reduce", group, nbytes)
    return collectives * one


# Part of tensor-parallel communication that pipelining it with GEMMs leaves exposed, or loses in
# the GEMMs: chunks are smaller products and share multiprocessors. Assumed.
ASYNC_TP_EXPOSED = 0.4


_LAYERS: dict[tuple[object, ...], LayerSeconds] = {}
_LAYERS_KEPT = 20_000


def layer(case: Case, *, moe: bool) -> LayerSeconds:
    """One layer on one micro-batch; remembered by what it depends on, which is not pp, vpp or dp.

    Sharers must not change what they get: add and scale make new objects.
    """
    lay, batch = case.layout, case.batch
    key = (
        case.shape, case.gpu, case.network, case.software, case.knobs.recompute, moe,
        lay.tp, lay.cp, lay.ulysses, lay.ep, lay.etp, lay.sequence_parallel,
        batch.tokens, batch.attended, batch.micro_batches > 1,
    )  # fmt: skip
    found = _LAYERS.get(key)
    if found is None:
        if len(_LAYERS) >= _LAYERS_KEPT:
            _LAYERS.clear()
        found = _LAYERS[key] = _layer(case, moe)
    return found


def _layer(case: Case, moe: bool) -> LayerSeconds:
    shape, lay = case.shape, case.layout
    tokens = case.tokens_here(case.batch.tokens)
    gemms = shape.attention_gemms(lay.tp)
    forward = _linear(case, tokens, gemms) + _attention(case, backward=False)
    backward = _linear_backward(case, tokens, gemms) + _attention(case, backward=True)
    ways = 2
    if not moe:
        mlp = shape.mlp_gemms(shape.model.ffn_hidden_size, lay.tp)
        forward += _linear(case, tokens, mlp)
        backward += _linear_backward(case, tokens, mlp)
        width = shape.model.ffn_hidden_size / lay.tp
    else:
        more_forward, more_backward, width = _experts(case, tokens)
        forward, backward = forward + more_forward, backward + more_backward
        assert shape.moe is not None
        if not shape.moe.shared_ffn_hidden_size:
            ways = 1  # the expert path dispatches tokens itself
    fwd_bytes, bwd_bytes = _elementwise(case, tokens, width)
    forward.elementwise += _stream_s(case, fwd_bytes)
    backward.elementwise += _stream_s(case, bwd_bytes)
    tp = _tensor_parallel_s(case, tokens, ways)
    if case.software.async_tp:
        # Pipelined with the GEMMs around them in tp chunks. What is hidden still slows the GEMMs.
        tp = max(ASYNC_TP_EXPOSED * tp, tp - 0.8 * forward.gemm)
    forward.tp += tp
    # Backward repeats the collectives mirrored; the extra all-gather of inputs for the weight
    # gradient overlaps with the input gradient's GEMM.
    backward.tp += tp
    recompute = Seconds()
    if case.knobs.recompute == "full":
        recompute = forward * 1.0
        if case.software.backend != "megatron" and not moe:
            # Non-reentrant checkpointing stops once what backward needs is there: the last
            # product's output is not (torch.utils.checkpoint, set_checkpoint_early_stop).
            n, k = shape.mlp_gemms(shape.model.ffn_hidden_size, lay.tp)[-1]
            recompute.gemm -= _mul_s(case, tokens, n, k)
    elif case.knobs.recompute == "selective":
        if case.software.backend == "megatron":
            recompute = Seconds(attention=forward.attention)
        else:
            # torchtitan's per-op policy keeps attention and every second matrix product.
            recompute = Seconds(gemm=0.5 * forward.gemm, elementwise=forward.elementwise)
    factor = case.software.overhead
    forward, backward, recompute = forward * factor, backward * factor, recompute * factor
    # A layer takes at least as long as the host needs to launch it.
    scale = 1.5 if moe else 1.0
    forward.host = max(0.0, case.software.host_forward_s * scale - forward.total)
    busy = backward.total + recompute.total
    backward.host = max(0.0, case.software.host_backward_s * scale - busy)
    return LayerSeconds(forward, backward, recompute)


# Products of routed experts against one dense product of the same shape: a grouped GEMM's experts
# share the GPU unevenly, and the slowest rank of a balanced router has some tokens more.
EXPERT_SLOWDOWN = 1.3

# Bytes moved per element of the copies of tokens that go to experts. fused: permute before and
# after dispatch and weighted sum, bf16 read and write each. eager: gather, scale in fp32,
# scatter-add.
_ROUTED_BYTES = {"fused": (12, 16), "compiled": (20, 28), "eager": (30, 40)}


def _distinct(places: int, copies: int) -> float:
    """Expected number of nodes (or ranks) that `copies` uniformly chosen experts lie on."""
    return places * (1.0 - (1.0 - 1.0 / places) ** copies)


def _experts(case: Case, tokens: float) -> tuple[Seconds, Seconds, float]:
    """Router, dispatch, routed and shared experts: forward, backward, activation width a token.

    Tokens split over tp (sequence parallelism), go to the ep ranks that hold their experts
    (all-to-all), through local experts (one grouped product, as many tokens each on average),
    and back.
    """
    shape, lay, moe = case.shape, case.layout, case.shape.moe
    assert moe is not None
    h, topk = shape.model.hidden_size, moe.experts_per_token
    own = tokens / lay.tp
    # Token copies that this rank sends; the busiest rank, for which all wait, receives more.
    routed = own * topk * (case.software.expert_imbalance if lay.ep > 1 else 1.0)
    local = moe.num_experts / lay.ep
    # etp ranks see each other's tokens.
    each = routed * lay.etp / local
    gemms = shape.mlp_gemms(moe.expert_ffn_hidden_size, lay.etp)
    forward = _linear(case, each, gemms, local) * EXPERT_SLOWDOWN
    forward += _linear(case, own, [(moe.num_experts, h)])
    backward = _linear_backward(case, each, gemms, local) * EXPERT_SLOWDOWN
    backward += _linear_backward(case, own, [(moe.num_experts, h)])
    moved = 2.0 * routed * h
    fwd, bwd = _ROUTED_BYTES[case.software.elementwise]
    forward.elementwise += _stream_s(case, fwd * routed * h)
    backward.elementwise += _stream_s(case, bwd * routed * h)
    width = local * each * moe.expert_ffn_hidden_size / lay.etp / tokens
    if lay.ep > 1:
        one = _dispatch_s(case, moved)
        forward.ep += 2 * one
        backward.ep += 2 * one
    if moe.shared_ffn_hidden_size:
        shared = shape.mlp_gemms(moe.shared_ffn_hidden_size, lay.tp)
        forward += _linear(case, tokens, shared)
        backward += _linear_backward(case, tokens, shared)
        width += moe.shared_ffn_hidden_size / lay.tp
    return forward, backward, width


# DeepEP's own measurement of dispatch inside a node of 8 H800 or H100: 153 to 158 GB/s a GPU of the
# 450 GB/s link (README of deepseek-ai/DeepEP, normal kernels, EP 8).
_DEEPEP_NVLINK_SHARE = 155 / 450


def _dispatch_s(case: Case, nbytes: float) -> float:
    """Send copies of tokens (`nbytes` a rank) to the ranks of their experts: one direction.

    Plain all-to-all sends every copy. DeepEP sends a token once to each node that has any of its
    experts, over the network, and once to each such rank, over NVLink.
    """
    group, moe = case.group("ep"), case.shape.moe
    assert moe is not None
    if case.software.dispatch != "deepep":
        return collective_s(case.gpu, case.network, "alltoall", group, nbytes)
    topk = moe.experts_per_token
    nodes = _distinct(group.nodes, topk)
    if case.shape.expert_groups_per_token:
        nodes = min(nodes, case.shape.expert_groups_per_token)
    ranks = min(_distinct(group.ranks, topk), nodes * group.per_node)
    inside = nbytes * ranks / topk / (_DEEPEP_NVLINK_SHARE * case.gpu.nvlink_bytes_s)
    if group.nodes == 1:
        return inside
    sent = nbytes * nodes / topk
    return max(inside, collective_s(case.gpu, case.network, "alltoall", group, sent))


# inplace: flash-attn's cross-entropy, gradients written over the logits.
# Bytes moved per logit, forward and backward together, beyond the product itself.
# eager: cast to fp32 (6), log-softmax (8), gather, its gradient (12), cast back (6).
# compiled: two passes forward, one read and one write back. fused: one read, one in-place write.
# chunked: an RL loss with entropy, in fp32 PyTorch operations on a chunk at a time, about twelve
# passes forward (made again in backward) and twenty-four backward; fitted: prime-rl qwen3-0.6b.
# fp32_rl: cast to fp32 (6), one read; one gradient written (8) and cast (6). fp32_rl_entropy: two
# reads more, compiled; its gradient (8) and adding it (12).
_LOGIT_BYTES = {
    "eager": (14, 18),
    "copied": (18, 22),
    "fused": (6, 6),
    "vocab_parallel": (14, 12),
    "inplace": (4, 4),
    "chunked": (100, 200),
    "rl": (8, 8),
    "rl_entropy": (24, 24),
    "fp32_rl": (10, 14),
    "fp32_rl_entropy": (18, 34),
}


def head(case: Case) -> LayerSeconds:
    """Final norm, output layer and loss of one micro-batch, on the last stage."""
    m, lay = case.shape.model, case.layout
    tokens = case.tokens_here(case.batch.tokens)
    if m.value_head:
        small = Seconds(elementwise=_stream_s(case, 6.0 * tokens * m.hidden_size))
        return LayerSeconds(small, small * 2.0, Seconds())
    vocab = m.vocab_size / lay.tp
    product = _mul_s(case, tokens, vocab, m.hidden_size, low=False)
    fwd, bwd = _LOGIT_BYTES[case.software.loss]
    forward = Seconds(gemm=product, elementwise=_stream_s(case, fwd * tokens * vocab))
    input_gradient = _mul_s(case, tokens, m.hidden_size, vocab, low=False)
    weight_gradient = (
        0.0 if case.software.lora_rank else _mul_s(case, vocab, m.hidden_size, tokens, low=False)
    )
    backward = Seconds(
        gemm=input_gradient + weight_gradient,
        elementwise=_stream_s(case, bwd * tokens * vocab),
    )
    if lay.tp > 1:
        nbytes = 2.0 * tokens * m.hidden_size
        op = "all_gather" if lay.sequence_parallel else "all_reduce"
        backward.tp += collective_s(case.gpu, case.network, op, case.group("tp"), nbytes)
    recompute = Seconds()
    if case.software.loss == "chunked":
        recompute = forward * 1.0  # logits of a chunk are made again in backward
    factor = case.software.overhead
    return LayerSeconds(forward * factor, backward * factor, recompute * factor)
