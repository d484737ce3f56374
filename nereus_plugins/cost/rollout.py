"""Seconds and memory of generation: prefill and decode under continuous batching.

One engine replica (tp x pp ranks) decodes the sequences it was given: as many at once as its
key-value cache holds and its limit allows, the next admitted when one ends. The responses' lengths
are a stratified sample of their distribution, with the longest of the whole job in it, so that the
tail is there: the time when the last long responses decode alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from nereus_plugins.spec import Layout, LengthDistribution

from .communication import Group, collective_s
from .compute import HBM_EFFICIENCY
from .hardware import GPU, Network
from .kernels import attention_s, decode_attention_s, gemm_s
from .shape import Shape
from .step import Part

# Assumed: what the engine's scheduler, sampler and detokeniser cost the host in one decode step of
# b sequences beside the captured graph (vLLM's V1 engine overlaps some of it).
HOST_STEP_S = 1.5e-3
HOST_SEQUENCE_S = 5.0e-6
# All-reduce inside the engine's tp group is a custom kernel for small messages.
SMALL_ALL_REDUCE_S = 8e-6


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Generation of one iteration.

    Attributes:
        parts: seconds: prefill, decode (busy), tail (less than half of the peak batch active).
        concurrency: sequences a replica decodes at once at its peak.
        cache_bytes: key-value cache used at the peak on one GPU.
        weight_bytes: the engine's weights on one GPU.
        preempted: whether the cache, not the sequence limit, bounded the batch.
    """

    parts: tuple[Part, ...]
    concurrency: int
    cache_bytes: float
    weight_bytes: float
    preempted: bool

    @property
    def seconds(self) -> float:
        return sum(p.value for p in self.parts)


def engine_weight_bytes(shape: Shape, layout: Layout) -> float:
    """bf16 weights of an engine replica on one GPU (experts spread over its tp ranks as well)."""
    return 2.0 * shape.num_parameters() / (layout.tp * layout.pp)


def cache_bytes_per_token(shape: Shape, layout: Layout) -> float:
    """Key-value cache of one token on one GPU: 2 * layers * kv heads * head_dim * 2 bytes / tp.

    With fewer key-value heads than tp ranks every rank still holds one.
    """
    m = shape.model
    if shape.mla is not None:  # one latent for all heads, on every tp rank
        return 2.0 * m.num_layers * (shape.mla.kv_lora + shape.mla.qk_rope) / layout.pp
    heads = max(1.0, m.num_kv_heads / layout.tp)
    return 4.0 * m.num_layers * heads * shape.head_dim / layout.pp


def _decode_step_s(
    gpu: GPU, network: Network, shape: Shape, layout: Layout, batch: int, context: float
) -> float:
    """One new token for each of `batch` sequences of mean length `context`."""
    m, tp = shape.model, layout.tp
    bw = gpu.hbm_bytes_s * HBM_EFFICIENCY
    linear = sum(gemm_s(gpu, batch, n, k) for n, k in shape.attention_gemms(tp))
    dense = sum(gemm_s(gpu, batch, n, k) for n, k in shape.mlp_gemms(m.ffn_hidden_size, tp))
    experts = 0.0
    if shape.moe is not None:
        moe = shape.moe
        hit = moe.num_experts * (1.0 - (1.0 - moe.experts_per_token / moe.num_experts) ** batch)
        weights = hit * shape.expert_params() / tp
        flops = 2.0 * batch * moe.experts_per_token * shape.expert_params() / tp
        # One fused kernel: the weights of the experts hit are read once.
        experts = max(2.0 * weights / bw, flops / (0.5 * gpu.bf16_flops)) + 10e-6
        if moe.shared_ffn_hidden_size:
            gemms = shape.mlp_gemms(moe.shared_ffn_hidden_size, tp)
            experts += sum(gemm_s(gpu, batch, n, k) for n, k in gemms)
    if shape.mla is None:
        attention = decode_attention_s(
            gpu,
            batch=batch,
            context=context,
            kv_heads=max(1.0, m.num_kv_heads / tp),
            head_dim=shape.head_dim,
        )
    else:
        latent = batch * context * (shape.mla.kv_lora + shape.mla.qk_rope) * 2.0
        attention = latent / (0.6 * gpu.hbm_bytes_s) + 10e-6
    reduce = 0.0
    if tp > 1:
        nbytes = 2.0 * batch * m.hidden_size
        group = Group.of(tp, 1, network.gpus_per_node)
        one = collective_s(gpu, network, "all_reduce", group, nbytes)
        if group.nodes == 1 and nbytes < 2**19:
            one = SMALL_ALL_REDUCE_S + nbytes / (0.5 * gpu.nvlink_bytes_s)
        reduce = 2 * one
    small = 6 * 2.5e-6  # norms, rotary, cache write, activation: launch-bound inside the graph
    per_layer = linear + attention + reduce + small
    layers = m.num_layers * per_layer
    layers += shape.num_dense_layers * dense + shape.num_moe_layers * experts
    head = gemm_s(gpu, batch, max(1, m.vocab_size // tp), m.hidden_size)
    sampling = 12.0 * batch * m.vocab_size / bw
    host = HOST_STEP_S + HOST_SEQUENCE_S * batch
    # Pipeline stages take turns on micro-batches of the running sequences: a step is no shorter.
    hops = (layout.pp - 1) * 20e-6
    return layers + head + sampling + host + hops


def _prefill_s(
    gpu: GPU, network: Network, shape: Shape, layout: Layout, tokens: float, length: float
) -> float:
    """Read `tokens` prompt tokens, in chunks of up to 8192, sequences of mean `length`."""
    if tokens <= 0:
        return 0.0
    m, tp = shape.model, layout.tp
    chunk = min(tokens, 8192.0)
    rows = max(1, round(chunk))
    layer = sum(gemm_s(gpu, rows, n, k) for n, k in shape.attention_gemms(tp))
    layer += attention_s(
        gpu,
        batch=max(1.0, chunk / max(1.0, length)),
        seq=max(1.0, length),
        heads=max(1, m.num_attention_heads // tp),
        head_dim=shape.qk_head,
        kernel="fa3" if gpu.architecture == "hopper" else "fa2",
    )
    if tp > 1:
        group = Group.of(tp, 1, network.gpus_per_node)
        layer += 2 * collective_s(gpu, network, "all_reduce", group, 2.0 * rows * m.hidden_size)
    dense = sum(gemm_s(gpu, rows, n, k) for n, k in shape.mlp_gemms(m.ffn_hidden_size, tp))
    experts = 0.0
    if shape.moe is not None:
        moe = shape.moe
        each = max(1, round(rows * moe.experts_per_token / moe.num_experts))
        gemms = shape.mlp_gemms(moe.expert_ffn_hidden_size, tp)
        experts = moe.num_experts * sum(gemm_s(gpu, each, n, k) for n, k in gemms)
    total = m.num_layers * layer + shape.num_dense_layers * dense + shape.num_moe_layers * experts
    return math.ceil(tokens / chunk - 1e-9) * total / gpu.sustained / layout.pp


@functools.lru_cache(maxsize=10_000)
def rollout(
    gpu: GPU,
    network: Network,
    shape: Shape,
    layout: Layout,
    *,
    sequences: int,
    prompt: LengthDistribution,
    response: LengthDistribution,
    cache_budget_bytes: float,
    samples_per_prompt: int,
    max_sequences: int = 1024,
    prefix_caching: bool = True,
) -> Rollout | None:
    """Generate `sequences` responses on layout.dp replicas; None if not one fits the cache.

    Args:
        cache_budget_bytes: bytes of one GPU left for the key-value cache.
    """
    replicas = max(1, layout.dp * layout.cp * layout.ulysses)
    count = max(1, math.ceil(sequences / replicas))
    lengths = stratified(response, count, sequences)
    start = prompt.mean_tokens()
    per_token = cache_bytes_per_token(shape, layout)
    budget = cache_budget_bytes / per_token  # tokens
    if budget < start + float(lengths.max()):
        return None
    prompts = count / samples_per_prompt if prefix_caching else float(count)
    prefill = _prefill_s(gpu, network, shape, layout, prompts * start, start)

    # Decode in strides: every stride all active sequences grow by the same number of tokens.
    limit = min(max_sequences, count)
    stride = max(1, math.ceil(float(lengths.max()) / 96))
    left = np.zeros(0)
    grown = np.zeros(0)
    queue = 0
    busy = tail = 0.0
    peak_tokens, peak_batch, bounded = 0.0, 0, False
    table: dict[int, tuple[float, float]] = {}

    def step_s(batch: int, context: float) -> float:
        # Linear in context for a batch: two points each, shared by all strides.
        rounded = (
            batch
            if batch <= 8
            else int(round(batch / 8) * 8)
            if batch < 128
            else int(round(batch / 32) * 32)
        )
        if rounded not in table:
            low = _decode_step_s(gpu, network, shape, layout, rounded, 512.0)
            high = _decode_step_s(gpu, network, shape, layout, rounded, 8192.0)
            table[rounded] = (low, (high - low) / (8192.0 - 512.0))
        low, slope = table[rounded]
        return max(0.2 * low, low + slope * (context - 512.0))

    while len(left) or queue < count:
        # Admit while the cache holds what is there and half of what it will still grow.
        used = float((start + grown).sum() + 0.5 * left.sum())
        fresh: list[float] = []
        while queue < count and len(left) + len(fresh) < limit:
            need = start + 0.5 * float(lengths[queue])
            if used + need > budget and (len(left) or fresh):
                bounded = True
                break
            used += need
            fresh.append(float(lengths[queue]))
            queue += 1
        if fresh:
            left = np.concatenate([left, fresh])
            grown = np.concatenate([grown, np.zeros(len(fresh))])
        batch = len(left)
        peak_batch = max(peak_batch, batch)
        tokens = float((start + grown).sum())
        peak_tokens = max(peak_tokens, tokens)
        advance = min(float(stride), float(left.max()))
        seconds = advance * step_s(batch, tokens / batch + advance / 2)
        if batch < 0.5 * peak_batch and queue >= count:
            tail += seconds
        else:
            busy += seconds
        left = left - advance
        grown = grown + advance
        keep = left > 0
        left, grown = left[keep], grown[keep]
    parts = [
        Part("prefill", prefill, "prompt tokens through the layers, chunks of 8192"),
        Part("decode", busy, "steps of weights read + cache read + all-reduce + host"),
        Part("tail", tail, "the same, less than half of the peak batch still decoding"),
    ]
    return Rollout(
        tuple(p for p in parts if p.value > 0),
        peak_batch,
        min(peak_tokens * per_token, cache_budget_bytes),
        engine_weight_bytes(shape, layout),
        bounded,
    )


def stratified(distribution: LengthDistribution, count: int, total: int) -> np.ndarray:
    """`count` lengths at evenly spaced quantiles in a fixed random order; the longest of `total`.

    float64 [count], tokens.
    """
    at = (np.arange(count) + 0.5) / count
    lengths = np.array([distribution.quantile(float(p)) for p in at])
    lengths[-1] = distribution.quantile(1.0 - 0.5 / max(1, total))
    return np.random.default_rng(0).permutation(lengths)
