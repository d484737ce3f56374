"""Peak bytes on the fullest GPU of one model in training, or in a forward pass.

Allocated is what PyTorch's tensors take; reserved is what its caching allocator holds for them. The
CUDA context and NCCL's own buffers lie outside both (`GPU.context_bytes`).
"""

from __future__ import annotations

import dataclasses

from .case import Case
from .hardware import GPU
from .step import Part, lora_params, stage_params

# Of a GPU; a nominal device may have less.
OUTSIDE_TORCH_BYTES: float = GPU.context_bytes


@dataclasses.dataclass(frozen=True)
class Memory:
    """Parts that add up to the allocated peak, at the moment of the step when it occurs.

    Attributes:
        parts: bytes by cause.
        moment: "loss", "backward", "optimizer" or "forward".
        stage: pipeline stage with the peak.
        reserved_bytes: what the caching allocator holds at that moment.
    """

    parts: tuple[Part, ...]
    moment: str
    stage: int
    reserved_bytes: float

    @property
    def allocated_bytes(self) -> float:
        return sum(part.value for part in self.parts)

    def part(self, name: str) -> float:
        return sum(part.value for part in self.parts if part.name == name)


def _norm_saved(case: Case) -> float:
    """Bytes per element that one norm keeps, with the product's input it makes.

    Fused kernels keep input and output in bf16. Eager RMSNorm keeps the fp32 copy of its input
    and the bf16 value that the weight multiplies as well.
    """
    if case.software.elementwise == "eager" and case.shape.model.norm == "rmsnorm":
        return 4.0 + 2.0 + 2.0
    return 4.0


def layer_activation_bytes(case: Case, tokens: float, *, moe: bool) -> float:
    """What one layer keeps for backward, nothing recomputed; `tokens` as one rank holds them.

    Korthikanti et al. (arXiv:2205.05198, section 4) for flash attention, GQA and gated MLPs:
    norm inputs and outputs, q, k, v, attention's output and row sums, up projection and activation
    outputs. Without sequence parallelism norms are whole on every tp rank.
    """
    shape, lay, m = case.shape, case.layout, case.shape.model
    outside = tokens / (lay.tp if lay.sequence_parallel else 1)
    eager = case.software.elementwise == "eager"
    nbytes = 2 * _norm_saved(case) * m.hidden_size * outside
    if shape.mla is None:
        inside = 2.0 * (2 * m.query_size + 2 * m.kv_size)
        if m.qk_norm:
            inside += (_norm_saved(case) - 2.0) * (m.query_size + m.kv_size)
    else:
        a, heads = shape.mla, m.num_attention_heads
        inside = 2.0 * heads * (2 * shape.qk_head + 2 * a.v_head)
        nbytes += 2.0 * 2 * (a.q_lora + a.kv_lora + a.qk_rope) * tokens
    inside += 4.0 * m.num_attention_heads  # log-sum-exp rows, fp32
    nbytes += inside / lay.tp * tokens
    if case.software.attention == "unfused":
        # Probabilities, dropped-out probabilities and the mask: 2 + 2 + 1 bytes a score.
        nbytes += 5.0 * tokens * case.batch.attended * case.heads_per_rank
    per_width = (8.0 if eager else 6.0) if m.gated_mlp else 4.0
    if not moe:
        return nbytes + per_width * m.ffn_hidden_size / lay.tp * tokens
    assert shape.moe is not None
    routed = tokens * shape.moe.experts_per_token / lay.tp
    # Each copy's permuted input and its output before weighting (eager: gathered and sorted apart,
    # and weighted in fp32), and the experts' insides.
    nbytes += (12.0 if eager else 4.0) * routed * m.hidden_size
    nbytes += per_width * shape.moe.expert_ffn_hidden_size * routed
    nbytes += 8.0 * shape.moe.num_experts * tokens / lay.tp  # router logits and scores, fp32
    return nbytes + per_width * shape.moe.shared_ffn_hidden_size / lay.tp * tokens


def _kept_bytes(case: Case, tokens: float, *, moe: bool) -> tuple[float, str]:
    """Bytes a layer keeps between forward and backward, under the recompute and offload knobs."""
    shape, lay, m = case.shape, case.layout, case.shape.model
    outside = tokens / (lay.tp if lay.sequence_parallel else 1)
    entry = 2.0 * m.hidden_size * outside
    if case.knobs.recompute == "full":
        return (0.0, "offloaded") if case.knobs.offload_activations else (entry, "layer inputs")
    if case.knobs.recompute == "selective" and case.software.backend != "megatron":
        # torchtitan's policy: attention's output and every second product's output.
        products = sum(n for n, _ in shape.attention_gemms(lay.tp))
        width = m.ffn_hidden_size if shape.moe is None or not moe else 0
        products += sum(n for n, _ in shape.mlp_gemms(width, lay.tp))
        attention = (2.0 * m.query_size + 4.0 * m.num_attention_heads) / lay.tp
        return entry + (attention + products) * tokens, "inputs, attention, half of the products"
    return layer_activation_bytes(case, tokens, moe=moe), "norms, q k v, attention, MLP"


# Bytes per logit at the peak. eager: bf16 logits (2), fp32 log-softmax (4), its incoming (4) and
# outgoing (4) gradient, and that cast to bf16 (2). copied: shifted bf16 copy (2) more. fused
# (Megatron's jitted loss): bf16 logits, fp32 softmax, its gradient cast to bf16. vocab_parallel
# (Megatron's plain loss): bf16 logits, fp32 softmax overwritten by its gradient. chunked: fp32 and
# bf16 logits of a chunk. inplace: bf16 logits, overwritten by their gradient, and one cast.
# rl: bf16 logits, their gradient, and the fp32 log-sum-exp pass; rl_entropy: fp32 probabilities and
# their product with the logits beside (verl computes both on the whole micro-batch).
# fp32_rl (OpenRLHF): logits cast to fp32 in place of the bf16 ones (4), their gradient (4), and it
# cast to bf16 (2); fp32_rl_entropy: the gradient through the entropy before it is added (4).
_LOGIT_PEAK = {
    "eager": 16.0,
    "copied": 18.0,
    "fused": 8.0,
    "vocab_parallel": 6.0,
    "inplace": 4.0,
    "chunked": 6.0,
    "rl": 8.0,
    "rl_entropy": 14.0,
    "fp32_rl": 10.0,
    "fp32_rl_entropy": 14.0,
}
# DTensor's loss parallelism makes the shifted logits and their exponentials apart.
_LOSS_PARALLEL = 6.0
CHUNK_TOKENS = 2048
# DeepSpeed's default reduce_bucket_size and allgather_bucket_size, elements each.
DEEPSPEED_BUCKET_ELEMENTS = 5e8


def _logit_bytes(case: Case) -> float:
    m = case.shape.model
    if m.value_head:
        return 0.0
    tokens = case.tokens_here(case.batch.loss_tokens)
    per = _LOGIT_PEAK[case.software.loss]
    if case.layout.tp > 1 and case.software.backend == "fsdp":
        per += _LOSS_PARALLEL
    if case.software.loss == "chunked":
        tokens = min(tokens, CHUNK_TOKENS)
    if not case.trains:
        per = 6.0
    return per * tokens * m.vocab_size / case.layout.tp


def _working_bytes(case: Case, tokens: float, *, moe: bool) -> float:
    """Transient bytes in one layer's backward: gradients of its widest activations.

    The MLP's: gradient of the activation's output and of the up projection's output, beside the
    gradient of the residual stream. Sequence parallelism gathers: Megatron one input at a time;
    compiled DTensors keep those of attention and MLP from recomputation on, the output's gradient,
    and two partial gradients of the input until they are summed and scattered.
    """
    m, lay = case.shape.model, case.layout
    outside = tokens / (lay.tp if lay.sequence_parallel else 1)
    up = 2.0 if m.gated_mlp else 1.0
    width = (
        m.ffn_hidden_size / lay.tp
        if not moe or case.shape.moe is None
        else case.shape.moe.expert_ffn_hidden_size * case.shape.moe.experts_per_token / lay.tp
    )
    gathered = 2.0
    if case.software.backend == "fsdp":
        gathered = 3.0 * (1.0 if case.software.fp8 else 2.0) + 2 * 2.0
    gathered *= m.hidden_size * tokens if lay.sequence_parallel else 0.0
    if lay.cp > 1 and case.software.context_parallel == "gathered":
        # Whole keys and values; fp32 gradients: of own queries, own and incoming keys and values.
        gathered += (4.0 * lay.cp + 4.0 + 2 * 8.0) * tokens * m.query_size / lay.tp
    return 2.0 * (1.0 + up) * width * tokens + 2 * 2.0 * m.hidden_size * outside + gathered


def memory(case: Case, stage: int | None = None) -> Memory:
    """Peak of one pipeline stage, or of the fullest."""
    pp = case.layout.pp
    # Earlier stages hold more micro-batches, the first the embedding, the last the logits; the
    # second may be the first without dense layers. No other stage is the fullest of even ones.
    even = case.first_stage_layers is None and case.last_stage_layers is None
    fullest = sorted({0, 1, pp // 2, pp - 1}) if even and pp > 4 else list(range(pp))
    stages = fullest if stage is None else [stage]
    peaks = [one for at in stages for one in _stage_peaks(case, at)]
    return max(peaks, key=lambda peak: peak.allocated_bytes)


def state_bytes(case: Case, stage: int) -> dict[str, tuple[float, str]]:
    """Weights, gradients and optimizer state that stay on a rank: bytes and formula."""
    # Not the batch: a search asks again for every batch and knob of a layout.
    key = (
        case.shape, case.layout, case.software, case.trains, stage,
        case.first_stage_layers, case.last_stage_layers,
    )  # fmt: skip
    found = _STATES.get(key)
    if found is None:
        if len(_STATES) >= _STATES_KEPT:
            _STATES.clear()
        found = _STATES[key] = _state_bytes(case, stage)
    return dict(found)


_STATES: dict[tuple[object, ...], dict[str, tuple[float, str]]] = {}
_STATES_KEPT = 20_000


def _state_bytes(case: Case, stage: int) -> dict[str, tuple[float, str]]:
    lay, soft = case.layout, case.software
    common, routed = stage_params(case, stage)
    shards = case.shard_ranks
    expert_shards = 1 if lay.sharding == "none" else max(1, min(shards, lay.expert_dp))
    sharded = common / shards + routed / expert_shards
    whole = common + routed
    keeps_whole = lay.sharding in ("none", "zero1", "zero2")
    trained, trained_shard = whole, sharded
    if soft.lora_rank:
        trained = lora_params(case, stage)
        trained_shard = trained / shards
    out: dict[str, tuple[float, str]] = {}
    if soft.backend == "fsdp" or lay.sharding == "zero3":
        # FSDP's sharded parameters are the masters; a gathered copy is transient.
        dtype = soft.master_bytes or soft.param_bytes
        base = dtype
        held = whole if keeps_whole and lay.sharding != "none" else sharded
        if lay.sharding == "zero2":
            # SHARD_GRAD_OP keeps the gathered copy from forward to backward.
            out["weights"] = (sharded * dtype + whole * soft.param_bytes, "masters/N + gathered")
        else:
            held = sharded if lay.sharding != "none" else whole
            out["weights"] = (held * base, f"{held:.3g} parameters * {base:g} bytes")
        if soft.lora_rank:
            out["weights"] = (
                out["weights"][0] + trained_shard * dtype,
                out["weights"][1] + " + adapters",
            )
        if lay.pp > 1:
            # Parameters stay gathered and gradients whole until the last micro-batch.
            out["gathered"] = (whole * soft.param_bytes, "gathered for all micro-batches")
            out["gradients"] = (trained * soft.reduce_bytes, "whole until the last micro-batch")
        elif case.trains:
            out["gradients"] = (trained_shard * soft.grad_bytes, f"/N * {soft.grad_bytes:g} bytes")
        if case.trains:
            out["optimizer"] = (
                trained_shard * soft.moment_bytes,
                f"/N * {soft.moment_bytes:g} bytes (moments)",
            )
    else:
        out["weights"] = (whole * soft.param_bytes, f"{whole:.3g} * {soft.param_bytes:g} bytes")
        if soft.lora_rank:
            out["weights"] = (out["weights"][0] + trained * soft.param_bytes, "base + adapters")
        if case.trains:
            grads = trained_shard if lay.sharding == "zero2" else trained
            out["gradients"] = (grads * soft.grad_bytes, f"{grads:.3g} * {soft.grad_bytes:g} bytes")
            state = soft.master_bytes + soft.moment_bytes
            own = trained_shard if lay.sharding != "none" else trained
            out["optimizer"] = (own * state, f"{own:.3g} * {state:g} bytes (master, moments)")
    if soft.cpu_adam and case.trains:
        # Gradients follow bucket by bucket as backward makes them.
        out["optimizer"] = out["gradients"] = (0.0, "in host memory")
    if soft.average and lay.sharding != "zero3":  # under which OpenRLHF has it in host memory
        out["average"] = (whole * soft.param_bytes, f"{whole:.3g} * {soft.param_bytes:g} bytes")
    return out


def _stage_peaks(case: Case, stage: int) -> list[Memory]:
    shape, lay, soft, knobs = case.shape, case.layout, case.software, case.knobs
    dense, sparse = case.stage_layers()[stage]
    last = stage == lay.pp - 1
    if last and shape.mtp_layers:
        dense, sparse = (dense, sparse + 1) if shape.moe else (dense + 1, sparse)
    tokens = case.tokens_here(case.batch.longest_tokens)
    state = state_bytes(case, stage)
    moe = sparse > 0

    kept = kept_one = 0.0
    formula = ""
    for is_moe, count in ((False, dense), (True, sparse)):
        if count and case.trains:
            one, formula = _kept_bytes(case, tokens, moe=is_moe)
            kept += count * one
            kept_one = one
    if case.trains and stage == 0:
        # Embedding output, in the residual dtype.
        kept += 2.0 * shape.model.hidden_size * tokens / (lay.tp if lay.sequence_parallel else 1)
    in_flight = case.in_flight(stage)
    if lay.pp > 1:
        formula += f", {in_flight:.3g} micro-batches in flight"

    gathered = 0.0
    gathered_formula = ""
    # One rank gathers as well: its masters are fp32, what it multiplies bf16.
    sharded_weights = lay.sharding in ("zero3", "fsdp", "hsdp") and lay.pp == 1
    one_layer = 0.0
    if dense or sparse:
        one_layer = float(shape.dense_layer_params(lay.tp))
        if moe and shape.moe is not None:
            one_layer = float(shape.moe_shared_params(lay.tp)) + (
                shape.moe.num_experts / lay.ep * shape.expert_params(lay.etp)
            )
    root = 0.0
    if sharded_weights:
        # This layer and the next, gathered; and the root's embedding and output layer.
        root = (shape.embedding_params(lay.tp) if stage == 0 else 0) + (
            shape.head_params(lay.tp) if last else 0
        )
        gathered = (2 * one_layer + root) * soft.param_bytes
        gathered_formula = "two gathered layers, embedding and output layer"
    if soft.backend == "deepspeed" and case.trains:
        gathered += DEEPSPEED_BUCKET_ELEMENTS * (soft.param_bytes + soft.grad_bytes)
        gathered_formula = (gathered_formula + ", " if gathered_formula else "") + "buckets"
    logits = _logit_bytes(case) if last else 0.0
    if last and soft.backend == "fsdp" and lay.pp > 1 and case.trains:
        # torch.distributed.pipelining returns the outputs of all micro-batches.
        logits += (2.0 * case.batch.micro_batches) * (
            case.tokens_here(case.batch.loss_tokens) * shape.model.vocab_size / lay.tp
        )
    between = 0.0
    if soft.backend == "fsdp" and lay.pp > 1 and case.trains:
        # Receive buffers of all micro-batches, and what was sent, are kept for the whole step.
        row = 2.0 * shape.model.hidden_size * tokens / (lay.tp if lay.sequence_parallel else 1)
        kinds = (stage > 0) + 2 * (not last)
        between = kinds * row * case.batch.micro_batches * lay.vpp
    working = _working_bytes(case, tokens, moe=moe)
    framework = 2.0 * case.gpu.cublas_workspace_bytes + case.gpu.framework_bytes
    kept_total = kept * in_flight

    def peak(moment: str, **parts: tuple[float, str]) -> Memory:
        listed = [Part(name, value, text) for name, (value, text) in state.items() if value > 0]
        wide = case.gpu.width
        listed += [Part(n, wide * value, text) for n, (value, text) in parts.items() if value > 0]
        listed.append(Part("framework", framework, "cuBLAS workspaces, small buffers"))
        allocated = sum(p.value for p in listed)
        return Memory(tuple(listed), moment, stage, reserved_bytes(case, allocated, listed))

    if not case.trains:
        return [
            peak(
                "forward",
                activations=(layer_activation_bytes(case, tokens, moe=moe) / 2, "one layer"),
                logits=(logits, "largest micro-batch"),
                communication=(gathered, gathered_formula),
            )
        ]
    # FSDP frees gradients between steps: none exist yet when the only micro-batch meets its loss.
    early = soft.backend == "fsdp" and case.batch.micro_batches == 1
    saved_gradients = state.get("gradients", (0.0, ""))
    out = []
    if early:
        state["gradients"] = (0.0, "")
    out.append(
        peak(
            "loss",
            activations=(kept_total, formula),
            logits=(logits, f"{_LOGIT_PEAK[soft.loss]:g} bytes * tokens * vocabulary / tp"),
            pipeline=(between, "received and sent, of all micro-batches"),
            communication=(gathered - one_layer * soft.param_bytes * (1 if gathered else 0),
                           gathered_formula),
        )
    )  # fmt: skip
    reducing = 0.0
    if lay.sharding in ("zero3", "fsdp", "hsdp") and not soft.lora_rank:
        # A layer's whole gradient, as computed and as reduced.
        reducing = one_layer * (soft.param_bytes + soft.reduce_bytes)
    again = 0.0
    if knobs.recompute == "full":
        again = layer_activation_bytes(case, tokens, moe=moe)
    elif knobs.recompute == "selective" and soft.backend != "megatron":
        again = max(0.0, layer_activation_bytes(case, tokens, moe=moe) - kept_one)
    out.append(
        peak(
            "backward",
            activations=(kept_total + again, formula + (", one layer again" if again else "")),
            working=(working, "gradients inside one layer"),
            pipeline=(between, "received and sent, of all micro-batches"),
            communication=(gathered + reducing, gathered_formula + ", one layer's gradient"),
        )
    )
    state["gradients"] = saved_gradients
    out.append(peak("optimizer", working=(0.0, "")))
    return out


# Reserved over allocated: blocks that fit no request. Large blocks of a training step are of few
# sizes and reused; what varies with the batch fragments. PyTorch's expandable segments map pages
# instead.
_FRAGMENTED = {True: 0.02, False: 0.06}


def reserved_bytes(case: Case, allocated: float, parts: list[Part]) -> float:
    moving = sum(
        p.value
        for p in parts
        if p.name in ("activations", "logits", "working", "communication", "gradients")
    )
    unfit = 2.0 * _FRAGMENTED[case.software.expandable_segments] * moving
    return allocated + unfit + case.gpu.unused_bytes
