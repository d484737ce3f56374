"""Seconds of one training step, or of one forward pass, of one model: `step(case)`."""

from __future__ import annotations

import dataclasses
import functools

from .case import Case
from .communication import collective_s, point_to_point_s
from .compute import HBM_EFFICIENCY, LayerSeconds, Seconds, head, layer
from .shape import Shape


@dataclasses.dataclass(frozen=True)
class Part:
    """A share of an estimate: seconds (or bytes), and the formula they come from."""

    name: str
    value: float
    formula: str


@dataclasses.dataclass(frozen=True)
class Step:
    """Parts that add up to the step's seconds."""

    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        return sum(part.value for part in self.parts)

    def part(self, name: str) -> float:
        return sum(part.value for part in self.parts if part.name == name)


def stage_params(case: Case, stage: int) -> tuple[float, float]:
    """Parameters of a pipeline stage on one rank: (those all dp ranks share, routed experts).

    A tied output layer on another stage than the embedding is a second copy.
    """
    lay = case.layout
    layers = case.stage_layers()[stage]
    return _stage_params(case.shape, lay.tp, lay.ep, lay.etp, lay.pp, stage, layers)


@functools.lru_cache(maxsize=10_000)
def _stage_params(
    shape: Shape, tp: int, ep: int, etp: int, pp: int, stage: int, layers: tuple[int, int]
) -> tuple[float, float]:
    dense, sparse = layers
    common: float = dense * shape.dense_layer_params(tp)
    routed = 0.0
    if sparse:
        assert shape.moe is not None
        common += sparse * shape.moe_shared_params(tp)
        routed = sparse * shape.moe.num_experts / ep * shape.expert_params(etp)
    if stage == 0:
        common += shape.embedding_params(tp)
    if stage == pp - 1:
        common += shape.head_params(tp)
        if shape.model.tied_embeddings and pp > 1:
            common += shape.model.vocab_size * shape.model.hidden_size / tp
        if shape.mtp_layers:
            common += shape.mtp_layers * (
                2 * shape.model.hidden_size**2 / tp + shape.dense_layer_params(tp)
                if shape.moe is None
                else shape.moe_shared_params(tp) + 2 * shape.model.hidden_size**2 / tp
            )
            if shape.moe is not None:
                routed += (shape.mtp_layers * shape.moe.num_experts / ep) * shape.expert_params(etp)
    return float(common), float(routed)


def lora_params(case: Case, stage: int) -> float:
    """Trained adapter parameters of a stage on one rank: rank * (inputs + outputs) per weight."""
    shape, lay, rank = case.shape, case.layout, case.software.lora_rank
    dense, sparse = case.stage_layers()[stage]
    per: float = sum(n + k for n, k in shape.attention_gemms(lay.tp)) * (dense + sparse)
    per += dense * sum(n + k for n, k in shape.mlp_gemms(shape.model.ffn_hidden_size, lay.tp))
    if sparse and shape.moe is not None:
        gemms = shape.mlp_gemms(shape.moe.expert_ffn_hidden_size, lay.etp)
        per += sparse * shape.moe.num_experts / lay.ep * sum(n + k for n, k in gemms)
    return float(rank * per)


@dataclasses.dataclass(frozen=True)
class _StageTime:
    forward: Seconds
    backward: Seconds
    recompute: Seconds

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total + self.recompute.total


def _stage_times(case: Case) -> list[_StageTime]:
    """One micro-batch on each stage, communication that FSDP does for layers not counted."""
    dense_layer = layer(case, moe=False) if case.shape.num_dense_layers else None
    moe_layer = layer(case, moe=True) if case.shape.num_moe_layers else None
    out: list[_StageTime] = []
    stages = case.stage_layers()
    for stage, (dense, sparse) in enumerate(stages):
        if 0 < stage < len(stages) - 1 and stages[stage] == stages[stage - 1]:
            out.append(out[-1])
            continue
        forward, backward, recompute = Seconds(), Seconds(), Seconds()

        def add(one: LayerSeconds | None, count: float) -> None:
            nonlocal forward, backward, recompute
            if one is not None and count:
                forward += one.forward * count
                backward += one.backward * count
                recompute += one.recompute * count

        add(dense_layer, dense)
        add(moe_layer, sparse)
        if stage == len(stages) - 1:
            add(head(case), 1 + case.shape.mtp_layers)
            add(moe_layer or dense_layer, case.shape.mtp_layers)
        if not case.trains:
            backward, recompute = Seconds(), Seconds()
        out.append(_StageTime(forward, backward, recompute))
    return out


def _unshard(case: Case) -> tuple[float, str]:
    """Exposed seconds a micro-batch adds to gather parameters and reduce gradients layer by layer.

    FSDP gathers layer i+1 while layer i computes and reduces layer i+1's gradients while layer i's
    backward runs: a layer costs the larger of the two. What runs beside compute also slows it: NCCL
    takes streaming multiprocessors and memory bandwidth.
    """
    lay = case.layout
    if lay.sharding not in ("zero2", "zero3", "fsdp", "hsdp") or case.shard_ranks == 1:
        return 0.0, ""
    group, soft, shape = case.group("shard"), case.software, case.shape
    gathers = lay.sharding in ("zero3", "fsdp", "hsdp")
    # FSDP's SHARD_GRAD_OP gathers in forward and keeps; DeepSpeed's ZeRO-2 once after the update.
    once = lay.sharding == "zero2" and soft.backend == "fsdp"
    dense, sparse = case.stage_layers()[0]
    total = 0.0
    for moe, count in ((False, dense), (True, sparse)):
        if not count:
            continue
        params = float(shape.dense_layer_params(lay.tp))
        if moe and shape.moe is not None:
            params = float(shape.moe_shared_params(lay.tp))
            params += shape.moe.num_experts / lay.ep * shape.expert_params(lay.etp)
        time = layer(case, moe=moe)
        gather = (
            collective_s(case.gpu, case.network, "all_gather", group, params * soft.param_bytes)
            if gathers or once
            else 0.0
        )
        reduce = 0.0
        if case.trains and not soft.lora_rank:
            reduce = collective_s(
                case.gpu, case.network, "reduce_scatter", group, params * soft.reduce_bytes
            )
            if case.group("replicas").ranks > 1:
                reduce += collective_s(
                    case.gpu,
                    case.network,
                    "all_reduce",
                    case.group("replicas"),
                    params * soft.reduce_bytes / case.shard_ranks,
                )
        ways = [(gather, time.forward.total)]
        if case.trains and lay.pp > 1:
            # torch.distributed.pipelining reduces once all backwards are done, beside nothing.
            total += count * reduce
        elif case.trains:
            # FSDP copies into and out of flat buffers around each collective.
            again = 0.0 if once else gather
            ways.append((again + reduce, time.backward.total + time.recompute.total))
        for wire, busy in ways:
            hidden = min(wire, busy)
            total += count * (max(0.0, wire - busy) + CONTENTION * hidden)
    # The first layer's gather and the last layer's reduction have nothing to hide behind.
    edge = collective_s(
        case.gpu,
        case.network,
        "all_gather",
        group,
        shape.embedding_params(lay.tp) * soft.param_bytes,
    )
    total += (edge if gathers else 0.0) * (2.0 if case.trains and not soft.lora_rank else 1.0)
    return total, (
        "sum over layers of max(0, gather [+ reduce] - compute) "
        f"+ {CONTENTION} * hidden part + embedding"
    )


# Slow-down of compute while a collective runs beside it (NCCL kernels hold up to 24 of 108 to 132
# multiprocessors; not more than this on average: fitted with the overhead constants).
CONTENTION = 0.5


def _data_parallel(case: Case, backward_s: float, forward_s: float) -> tuple[float, float, str]:
    """Exposed gradient reduction and parameter gather of data parallelism, once a step."""
    lay, soft = case.layout, case.software
    if lay.sharding == "zero2" and soft.backend == "deepspeed" and case.trains:
        whole = sum(stage_params(case, 0)) * soft.param_bytes
        gather = collective_s(case.gpu, case.network, "all_gather", case.group("shard"), whole)
        return 0.0, gather, "parameters gathered after the update"
    if lay.sharding not in ("none", "zero1") or not case.trains:
        return 0.0, 0.0, ""
    worst = max(range(lay.pp), key=lambda s: sum(stage_params(case, s)))
    common, routed = stage_params(case, worst)
    if soft.lora_rank:
        common, routed = lora_params(case, worst), 0.0
    reduce = gather = 0.0
    for params, name in ((common, "dp"), (routed, "edp")):
        group = case.group(name)
        if lay.sharding == "zero1":
            reduce += collective_s(
                case.gpu, case.network, "reduce_scatter", group, params * soft.reduce_bytes
            )
            gather += collective_s(
                case.gpu, case.network, "all_gather", group, params * soft.param_bytes
            )
        else:
            reduce += collective_s(
                case.gpu, case.network, "all_reduce", group, params * soft.reduce_bytes
            )
    formula = "gradients reduced, parameters gathered over dp"
    if soft.overlap_grad_reduce:
        # Buckets go out during the last micro-batch's backward; the first layer's cannot hide.
        reduce = max(reduce / 16, reduce - 0.8 * backward_s)
        formula += "; less what the last backward hides"
    if soft.overlap_param_gather:
        gather = max(gather / 16, gather - 0.8 * forward_s)
        formula += "; less what the first forward hides"
    return reduce, gather, formula


# Host-memory bandwidth of one rank's share of the CPU (a socket of 200 to 300 GB/s for four ranks,
# half of it reached).
HOST_MEMORY_BYTES_S = 25e9


def _optimizer(case: Case) -> tuple[float, str]:
    """Adam on this rank's part: read and write master and moments, read gradient, write parameter.

    Also the gradient norm (read) and zeroing gradients (write). Offloaded state crosses to the host
    and back, and the CPU computes the update at host-memory speed.
    """
    lay, soft = case.layout, case.software
    worst = 0.0
    for stage in range(lay.pp):
        common, routed = stage_params(case, stage)
        if soft.lora_rank:
            common, routed = lora_params(case, stage), 0.0
        dp = case.shard_ranks if lay.sharding != "none" else 1
        edp = min(dp, lay.expert_dp) if lay.sharding != "none" else 1
        full = common + routed
        own = common / dp + routed / edp
        state = 2 * (soft.master_bytes or soft.param_bytes) + 2 * soft.moment_bytes
        nbytes = own * (state + 2 * soft.grad_bytes + soft.param_bytes)
        nbytes += (full if lay.sharding in ("none", "zero1") else own) * soft.grad_bytes
        seconds = nbytes / (case.gpu.hbm_bytes_s * HBM_EFFICIENCY)
        if soft.cpu_adam:
            # DeepSpeedCPUAdam: gradient down, parameter up, state streamed through host memory.
            seconds += own * (soft.grad_bytes + soft.param_bytes) / case.gpu.host_bytes_s
            seconds += own * state / HOST_MEMORY_BYTES_S
        worst = max(worst, seconds)
    return worst, "read and write master and moments, gradient norm, zero gradients / HBM bandwidth"


def step(case: Case) -> Step:
    """One optimizer step (or one forward pass of the batch where the case does not train)."""
    lay, batch = case.layout, case.batch
    times = _stage_times(case)
    slowest = max(times, key=lambda t: t.total)
    # 1F1B: every micro-batch passes the slowest stage; filling and draining pass the others, in
    # chunks of 1/vpp of a stage where stages interleave (Narayanan et al., arXiv:2104.04473).
    bubble = sum(t.total for t in times) - slowest.total
    bubble /= lay.vpp
    count = float(batch.micro_batches)
    parts: list[Part] = []

    def add(name: str, value: float, formula: str) -> None:
        if value > 0:
            parts.append(Part(name, value, formula))

    both = slowest.forward + slowest.backward
    add(
        "gemm",
        count * both.gemm,
        "matrix products: 2mnk / (peak * measured efficiency * sustained)",
    )
    add(
        "attention", count * both.attention, "causal attention: measured rate, backward 2.5 x FLOPs"
    )
    add("elementwise", count * both.elementwise, "bytes of norms, rotary, activation, loss / HBM")
    add("recompute", count * slowest.recompute.total, f"forward again ({case.knobs.recompute})")
    add("tp_comm", count * both.tp, "collectives of each layer inside the tp group")
    add("cp_comm", count * both.cp, "keys and values round the ring, less attention time")
    add("ep_comm", count * both.ep, "dispatch and combine all-to-all")
    add("host", count * both.host, "launch time of a layer where it exceeds GPU time")
    if lay.pp > 1:
        add("bubble", bubble, f"(sum of stages - slowest) / vpp, {lay.pp} stages")
        rows = case.tokens_here(batch.tokens) / (lay.tp if lay.sequence_parallel else 1)
        hop = point_to_point_s(
            case.gpu,
            case.network,
            2.0 * rows * case.shape.model.hidden_size,
            same_node=case.same_node_stages,
        )
        ways = 2.0 if case.trains else 1.0
        # Interleaved sends overlap with compute in the steady state; 1F1B's do not.
        hops = count + lay.pp - 1 if lay.vpp == 1 else 2 * (lay.pp - 1) * lay.vpp
        add("pp_comm", ways * hops * hop, "activations and gradients between stages")
    exposed, formula = _unshard(case)
    # With pipeline stages FSDP keeps parameters gathered, and reduces once, from the first to the
    # last micro-batch.
    add("dp_comm", (1.0 if lay.pp > 1 else count) * exposed, formula)
    reduce, gather, formula = _data_parallel(
        case, slowest.backward.total + slowest.recompute.total, slowest.forward.total
    )
    add("dp_comm", reduce + gather, formula)
    if case.trains:
        seconds, formula = _optimizer(case)
        add("optimizer", seconds, formula)
        add("fixed", case.software.fixed_s, "data loading, logging, synchronisation of a step")
    return Step(tuple(parts))
