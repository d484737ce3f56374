"""`estimate(job, plan, cluster, workload)`: seconds and bytes of one iteration under a global plan.

Each model-stage is estimated by itself (`step`, `memory`, `rollout`), then the iteration is laid
out on the devices: stages that share devices run one after the other, in the order of the
algorithm; stages on other devices run as soon as what they need is there. On every device the peak
over the iteration is what rests there (units that are not offloaded) and what the running stage
adds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from nereus_plugins.spec import (
    Assignment,
    ClusterSpec,
    GlobalPlan,
    Knobs,
    Layout,
    LengthDistribution,
    ModelSpec,
    ModelStage,
    MoESpec,
    SpecError,
    WorkloadSpec,
)

from .case import Batch, Case, uneven_stages
from .communication import Group, collective_s
from .hardware import GPU, GPUS, Network, find_gpu
from .job import JobSpec
from .memory import Memory, memory, state_bytes
from .models import as_shape
from .pools import Pools, pool_of, pools_of
from .rollout import cache_bytes_per_token, engine_weight_bytes, rollout
from .shape import Shape
from .step import Part, Step, step

S = ModelStage

# What each stage waits for. Old log-probabilities are part of actor-train.
_NEEDS: dict[ModelStage, tuple[ModelStage, ...]] = {
    S.ACTOR_GENERATE: (),
    S.REWARD_SCORE: (S.ACTOR_GENERATE,),
    S.REF_LOGPROB: (S.ACTOR_GENERATE,),
    S.CRITIC_VALUES: (S.ACTOR_GENERATE,),
    S.CRITIC_TRAIN: (S.CRITIC_VALUES, S.REF_LOGPROB, S.REWARD_SCORE),
    S.ACTOR_TRAIN: (S.CRITIC_VALUES, S.REF_LOGPROB, S.REWARD_SCORE),
}

# Weights broadcast from trainer to a separate engine over NCCL, bucket by bucket: 2.6 to 5.0 GB/s
# in verl's own table for 7B, 32B and 72B (docs/advance/delta_weight_sync.md @ 1dda039, "nccl full
# broadcast" on H100); software, not links, sets it.
BROADCAST_BYTES_S = 3.6e9
# Handing gathered weights to an engine in the same process: copies on the device.
HANDOVER_BYTES_S = 50e9
# Each tensor is named, gathered, converted and loaded on its own. Experts make many: in the same
# table Qwen3-30B-A3B (18,400 expert tensors) takes 32 s where dense Qwen2.5-32B takes 18 s, and
# docs/advance/fully_async.md has 15.8 s for it on 16 + 16 GPUs.
TENSOR_S = 0.7e-3


class Calibration(Protocol):
    """What a running job has taught (see calibration.py): what to expect of a stage."""

    def seconds(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_s: float
    ) -> float: ...

    def bytes(
        self, stage: ModelStage, assignment: Assignment | Placed, predicted_bytes: float
    ) -> float: ...


@dataclasses.dataclass(frozen=True)
class StageEstimate:
    """One model-stage of the plan.

    Attributes:
        stage: which.
        assignment: its layout, knobs and devices.
        parts: seconds by cause; they add up to `seconds`.
        memory: bytes by cause on its fullest GPU at the stage's peak, nothing else counted.
        allocated_bytes: their sum, and of all that rests on the same devices beside.
        reserved_bytes: what the caching allocator, the engine and the CUDA context hold then.
        resting: bytes of other units that lie on the same devices meanwhile, by unit.
        starts_s: when the stage starts in the iteration.
        capacity_bytes: memory of one of its GPUs.
        fits: whether reserved bytes stay within the GPU's memory.
        notes: what a reader must know (a cache that bounds the batch, a stage that cannot run).
    """

    stage: ModelStage
    assignment: Assignment
    parts: tuple[Part, ...]
    memory: tuple[Part, ...]
    allocated_bytes: float
    reserved_bytes: float
    resting: Mapping[str, float]
    starts_s: float
    capacity_bytes: float
    fits: bool
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(p.value for p in self.parts)

    def part(self, name: str) -> float:
        return sum(p.value for p in self.parts if p.name == name)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One iteration of a job under a plan.

    Attributes:
        stages: each model-stage.
        iteration_s: from the first stage's start to the last one's end.
    """

    stages: Mapping[ModelStage, StageEstimate]
    iteration_s: float

    @property
    def capacity_bytes(self) -> float:
        """Memory of one GPU of the stage that fills its own most."""
        return self.peak.capacity_bytes

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages.values())

    @property
    def peak(self) -> StageEstimate:
        """The stage that holds most of its GPUs' memory."""
        return max(self.stages.values(), key=lambda s: s.reserved_bytes / s.capacity_bytes)

    @property
    def slowest(self) -> StageEstimate:
        return max(self.stages.values(), key=lambda s: s.seconds)


@functools.lru_cache(maxsize=64)
def resolve_gpu(cluster: ClusterSpec) -> GPU:
    """The cluster's GPU as the kernel tables know it, with the cluster's own peak figures.

    A GPU without a table of its own name takes the efficiencies of the nearest architecture: H100's
    from 600 TFLOP/s up, A100's below.
    """
    spec = cluster.gpu
    try:
        known = find_gpu(spec.name)
    except KeyError:
        base = GPUS["h100_80gb" if spec.peak_flops >= 600e12 else "a100_80gb"]
        known = dataclasses.replace(base, name=spec.name, measured=False, fp8_flops=spec.peak_flops)
    return dataclasses.replace(
        known,
        memory_bytes=spec.memory_bytes,
        bf16_flops=spec.peak_flops,
        hbm_bytes_s=spec.memory_bandwidth_bytes_per_s,
        nvlink_bytes_s=cluster.intra_node.bandwidth_bytes_per_s,
    )


@functools.lru_cache(maxsize=64)
def resolve_network(cluster: ClusterSpec) -> Network:
    return Network(
        gpus_per_node=cluster.gpus_per_node,
        inter_node_bytes_s=cluster.inter_node.bandwidth_bytes_per_s,
        inter_node_latency_s=cluster.inter_node.latency_s or 8e-6,
    )


@functools.lru_cache(maxsize=1024)
def sequence_moments(workload: WorkloadSpec) -> tuple[float, float, float]:
    """(mean, mean of squares over mean, longest) of prompt plus response, in tokens.

    The longest is the 1 - 1/n quantile of n sequences of each.
    """
    grid = (np.arange(64) + 0.5) / 64
    prompt = np.array([workload.prompt_tokens.quantile(float(p)) for p in grid])
    answer = np.array([workload.response_tokens.quantile(float(p)) for p in grid])
    mean = float(prompt.mean() + answer.mean())
    square = float(prompt.var() + answer.var()) + mean * mean
    last = 1.0 - 0.5 / max(2, workload.sequences_per_step)
    longest = workload.prompt_tokens.quantile(last) + workload.response_tokens.quantile(last)
    return mean, square / mean, longest


def batch_of(
    job: JobSpec, assignment: Assignment | Placed, workload: WorkloadSpec, sequences: float
) -> Batch:
    """How `sequences` are cut into micro-batches on one data-parallel rank.

    By token budget: micro-batches are packed up to the budget, and a sequence longer than it makes
    one alone. By count: equal numbers of sequences; the largest micro-batch holds the longest one
    and its companions at their 90th percentile.
    """
    layout, knobs = assignment.layout, assignment.knobs
    mean, attended, longest = sequence_moments(workload)
    ranks = layout.dp
    own = max(1.0, sequences / ranks)
    split = layout.cp * layout.ulysses
    if knobs.token_budget_tokens is not None:
        budget = float(knobs.token_budget_tokens * split)
        total = own * mean
        # Karmarkar-Karp or first-fit packing fills micro-batches to within one mean sequence.
        count = max(1, math.ceil(total / max(mean, budget - 0.5 * mean)))
        peak = max(longest, min(budget, total))
        return Batch(count, total / count, attended, peak, peak)
    micro = min(float(knobs.micro_batch or 1), own)
    count = max(1, math.ceil(own / micro - 1e-9))
    if not job.packed:
        high = _padded_length(workload)
        return Batch(count, micro * high, high, micro * high, micro * high)
    high90 = workload.prompt_tokens.quantile(0.9) + workload.response_tokens.quantile(0.9)
    peak = longest + (micro - 1.0) * high90
    return Batch(count, micro * mean, attended, peak, peak)


def _padded_length(workload: WorkloadSpec) -> float:
    """What padding extends every sequence to: the configured maximum, or the longest."""
    last = 1.0 - 0.5 / max(2, workload.sequences_per_step)

    def cap(lengths: LengthDistribution) -> float:
        return float(lengths.max_tokens or lengths.quantile(last))

    return cap(workload.prompt_tokens) + cap(workload.response_tokens)


class Placed(NamedTuple):
    """A layout and knobs, devices left open: enough to cost a unit by itself."""

    layout: Layout
    knobs: Knobs
    devices: tuple[int, ...] = ()


@dataclasses.dataclass
class _Context:
    """`home`: the cluster that each stage runs on."""

    job: JobSpec
    assignments: Mapping[ModelStage, Assignment | Placed]
    home: Mapping[ModelStage, ClusterSpec]
    workload: WorkloadSpec

    def gpu(self, stage: ModelStage) -> GPU:
        return resolve_gpu(self.home[stage])

    def network(self, stage: ModelStage) -> Network:
        return resolve_network(self.home[stage])

    def shape(self, stage: ModelStage) -> Shape:
        return as_shape(self.job.model_of(stage))

    def case(self, stage: ModelStage, *, trains: bool, sequences: float) -> Case:
        assignment = self.assignments[stage]
        shape = self.shape(stage)
        first, last = uneven_stages(shape.model.num_layers, assignment.layout.pp) or (None, None)
        return Case(
            shape=shape,
            first_stage_layers=first,
            last_stage_layers=last,
            layout=assignment.layout,
            batch=batch_of(self.job, assignment, self.workload, sequences),
            gpu=self.gpu(stage),
            network=self.network(stage),
            software=self.job.software(stage),
            knobs=assignment.knobs,
            trains=trains,
        )


def estimate(
    job: JobSpec,
    plan: GlobalPlan,
    cluster: ClusterSpec | Pools,
    workload: WorkloadSpec,
    calibration: Calibration | None = None,
) -> Estimate:
    """Seconds and peak bytes of one iteration.

    Args:
        job: models, algorithm, software.
        plan: a layout, knobs and devices for each of the job's stages.
        cluster: devices and links; `Pools` where GPUs are of several kinds.
        workload: batch and lengths of one iteration.
        calibration: factors learned from the running job.

    Raises:
        SpecError: a stage of the job has no assignment, a layout does not divide its model, or a
            device is not in the cluster; the message names it.
    """
    pools = pools_of(cluster)
    home: dict[ModelStage, ClusterSpec] = {}
    context = _Context(job, plan.assignments, home, workload)
    wanted = job.stages()
    for stage in wanted:
        if stage not in plan.assignments:
            raise SpecError(f"plan {plan.name}: stage {stage} of the job has no assignment")
    for stage in plan.assignments:
        if stage not in wanted:
            raise SpecError(f"plan {plan.name}: the job has no stage {stage}; remove it")
        assignment = plan.assignments[stage]
        home[stage] = pool_of(pools, assignment.devices, str(stage)).cluster
        if stage is not S.ACTOR_GENERATE:
            try:
                check_layout(assignment.layout, job.model_of(stage))
            except SpecError as error:
                raise SpecError(f"{stage}: {error}") from None

    times: dict[ModelStage, tuple[Part, ...]] = {}
    peaks: dict[ModelStage, Memory | None] = {}
    notes: dict[ModelStage, list[str]] = {stage: [] for stage in wanted}
    generation: tuple[Part, ...] = ()
    for stage in wanted:
        if stage is S.ACTOR_GENERATE:
            continue
        times[stage], peaks[stage] = _model_stage(context, stage)
    resting = {stage: _resting(context, stage, wanted) for stage in wanted}
    if S.ACTOR_GENERATE in wanted:
        times[S.ACTOR_GENERATE], generation = _generate(
            context, resting[S.ACTOR_GENERATE], notes[S.ACTOR_GENERATE]
        )

    if calibration is not None:
        for stage in wanted:
            alone = sum(p.value for p in times[stage])
            factor = calibration.seconds(stage, plan.assignments[stage], alone) / alone
            times[stage] = tuple(
                dataclasses.replace(p, value=p.value * factor) for p in times[stage]
            )
    starts, end = _timeline(context, wanted, times)
    stages: dict[ModelStage, StageEstimate] = {}
    for stage in wanted:
        peak = peaks.get(stage)
        rest = resting[stage]
        beside = sum(rest.values())
        parts: tuple[Part, ...] = generation
        own = sum(p.value for p in generation)
        reserved = own
        if peak is not None:
            parts, own, reserved = peak.parts, peak.allocated_bytes, peak.reserved_bytes
        if calibration is not None:
            factor = calibration.bytes(stage, plan.assignments[stage], own) / own
            own, reserved = own * factor, reserved * factor
        held = reserved + beside + context.gpu(stage).context_bytes
        stages[stage] = StageEstimate(
            stage=stage,
            assignment=plan.assignments[stage],
            parts=times[stage],
            memory=parts,
            allocated_bytes=own + beside,
            reserved_bytes=held,
            resting=rest,
            starts_s=starts[stage],
            capacity_bytes=float(context.gpu(stage).memory_bytes),
            fits=held <= context.gpu(stage).memory_bytes
            and not any("cannot" in n for n in notes[stage]),
            notes=tuple(notes[stage]),
        )
    return Estimate(stages, end)


def check_layout(layout: Layout, model: ModelSpec) -> None:
    """`Layout.check`, but for pipeline stages that may be uneven where nothing is interleaved.

    Raises: SpecError naming the first rule that is broken.
    """
    if layout.vpp == 1 and uneven_stages(model.num_layers, layout.pp) is not None:
        model = dataclasses.replace(model, num_layers=layout.pp, moe=_shallow(model.moe))
    layout.check(model)


def _shallow(moe: MoESpec | None) -> MoESpec | None:
    return None if moe is None else dataclasses.replace(moe, num_dense_layers=0)


def _merged(steps: list[tuple[float, Step]], extra: list[Part]) -> tuple[Part, ...]:
    """Sum of steps, each taken a number of times, part by part."""
    total: dict[str, Part] = {}
    for times, one in steps:
        for part in one.parts:
            before = total.get(part.name)
            value = times * part.value + (before.value if before else 0.0)
            total[part.name] = Part(part.name, value, part.formula)
    for part in extra:
        if part.value > 0:
            total[part.name] = part
    return tuple(total.values())


def _model_stage(context: _Context, stage: ModelStage) -> tuple[tuple[Part, ...], Memory]:
    parts, case = _stage_seconds(context, stage)
    return parts, memory(case)


def _stage_seconds(context: _Context, stage: ModelStage) -> tuple[tuple[Part, ...], Case]:
    """Seconds by cause, and the case that decides the stage's peak memory."""
    job, workload = context.job, context.workload
    everything = float(workload.sequences_per_step)
    if stage in (S.ACTOR_TRAIN, S.CRITIC_TRAIN):
        updates = workload.updates_per_step
        per_update = float((workload.mini_batch_prompts or 1) * workload.samples_per_prompt)
        case = context.case(stage, trains=True, sequences=per_update)
        steps = [(float(updates), step(case))]
        extra = _offload_parts(case)
        if stage is S.ACTOR_TRAIN and job.old_logprob and job.algorithm != "sft":
            forward = step(context.case(stage, trains=False, sequences=everything))
            extra.append(
                Part("old_logprob", forward.seconds, "forward pass over the batch, training layout")
            )
        return _merged(steps, extra), case
    case = context.case(stage, trains=False, sequences=everything)
    return _merged([(1.0, step(case))], _offload_parts(case)), case


def _offload_parts(case: Case) -> list[Part]:
    """Loading what rests in host memory before the stage, and putting it back after."""
    knobs, parts = case.knobs, []
    state = state_bytes(case, 0)
    if knobs.offload_params:
        moved = state["weights"][0] * (2.0 if case.trains else 1.0)
        parts.append(Part("load_params", moved / case.gpu.host_bytes_s, "weights over PCIe"))
    if knobs.offload_optimizer and case.trains and not case.software.cpu_adam:
        moved = 2.0 * state["optimizer"][0]
        parts.append(
            Part(
                "load_optimizer",
                moved / case.gpu.host_bytes_s,
                "optimizer state over PCIe, both ways",
            )
        )
    return parts


def _unit_resting_bytes(context: _Context, stage: ModelStage) -> float:
    """What a unit keeps on its GPUs while another stage runs."""
    trains = stage in (S.ACTOR_TRAIN, S.CRITIC_TRAIN)
    case = context.case(stage, trains=trains, sequences=1.0)
    total = 0.0
    for name, (value, _) in state_bytes(case, 0).items():
        if name == "weights" and case.knobs.offload_params:
            continue
        if name == "optimizer" and case.knobs.offload_optimizer:
            continue
        if name in ("gradients", "gathered") and not _gradients_rest(case):
            continue
        total += value
    if case.software.backend == "deepspeed":
        # OpenRLHF's models are processes of their own on a GPU, each with a CUDA context.
        total += context.gpu(stage).context_bytes
    return total


def _gradients_rest(case: Case) -> bool:
    """Whether gradient buffers stay on the GPU between updates.

    FSDP and ZeRO-2 free gradients at the end of a step. Megatron's buffers stay, and leave with the
    parameters where those are offloaded; ZeRO-3's stay, and leave with the optimizer state.
    """
    if case.software.backend == "deepspeed":
        return case.layout.sharding == "zero3" and not case.knobs.offload_optimizer
    return case.software.backend == "megatron" and not case.knobs.offload_params


# The stage in which each unit's resting state is counted.
_HOME = {"actor": S.ACTOR_TRAIN, "critic": S.CRITIC_TRAIN, "ref": S.REF_LOGPROB,
         "reward": S.REWARD_SCORE}  # fmt: skip


def _resting(
    context: _Context, stage: ModelStage, wanted: tuple[ModelStage, ...]
) -> dict[str, float]:
    """Bytes of each other unit that share devices with `stage`."""
    devices = set(context.assignments[stage].devices)
    out: dict[str, float] = {}
    for unit, home in _HOME.items():
        if home not in wanted:
            continue
        if stage.model == unit and stage is not S.ACTOR_GENERATE:
            continue
        if devices & set(context.assignments[home].devices):
            value = _unit_resting_bytes(context, home)
            if context.job.updates_together and {stage, home} == {S.ACTOR_TRAIN, S.CRITIC_TRAIN}:
                value = _model_stage(context, home)[1].reserved_bytes
                value += context.gpu(home).context_bytes
            if value > 0:
                out[unit] = value
    engine = context.assignments.get(S.ACTOR_GENERATE)
    if engine is None or context.job.engine_sleeps:
        return out
    if stage is not S.ACTOR_GENERATE and devices & set(engine.devices):
        fraction = engine.knobs.rollout_memory_fraction or 0.6
        out["rollout"] = fraction * context.gpu(S.ACTOR_GENERATE).memory_bytes
    return out


def _generate(
    context: _Context, resting: Mapping[str, float], notes: list[str]
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Seconds and bytes of generation and of the weight sync before it."""
    job, workload = context.job, context.workload
    assignment = context.assignments[S.ACTOR_GENERATE]
    layout, gpu = assignment.layout, context.gpu(S.ACTOR_GENERATE)
    shape = context.shape(S.ACTOR_GENERATE)
    fraction = assignment.knobs.rollout_memory_fraction or 0.6
    weights = engine_weight_bytes(shape, layout)
    budget = fraction * gpu.memory_bytes - weights - gpu.engine_bytes
    per_token = cache_bytes_per_token(shape, layout)
    _, _, longest = sequence_moments(workload)
    made = None
    if budget > 0:
        made = rollout(
            gpu,
            context.network(S.ACTOR_GENERATE),
            shape,
            layout,
            sequences=workload.sequences_per_step,
            prompt=workload.prompt_tokens,
            response=workload.response_tokens,
            cache_budget_bytes=budget,
            samples_per_prompt=workload.samples_per_prompt,
            max_sequences=job.rollout_max_sequences,
            prefix_caching=job.prefix_caching,
        )
    if made is None:
        notes.append(
            f"the rollout engine cannot run: with rollout_memory_fraction={fraction:g} its weights "
            f"({weights / 2**30:.1f} GiB) leave {max(0.0, budget) / 2**30:.1f} GiB a GPU for the "
            f"cache, and one sequence of {longest:.0f} tokens takes "
            f"{per_token * longest / 2**30:.1f} GiB; raise rollout_memory_fraction or tp"
        )
    elif made.preempted:
        notes.append(
            f"the cache bounds the batch: {made.concurrency} sequences at once on a replica, of "
            f"{workload.sequences_per_step // max(1, layout.dp)}"
        )
    sync = Part("weight_sync", *_weight_sync(context))
    seconds = ((sync,) if sync.value > 0 else ()) + (made.parts if made else ())
    bytes_parts = (
        Part("weights", weights, "engine weights / (tp * pp), bf16"),
        Part("kv_cache", max(0.0, budget), f"{fraction:g} of the GPU less weights and engine"),
        Part("framework", gpu.engine_bytes, "engine activations, captured graphs"),
    )
    return seconds, bytes_parts


def weight_sync_floor_s(shape: Shape) -> float:
    """What handing trained weights to an engine on the same GPUs takes under any layout."""
    tensors = 9.0 * shape.model.num_layers
    if shape.moe is not None:
        tensors += 3.0 * shape.num_moe_layers * shape.moe.num_experts
    return 2.0 * shape.num_parameters() / HANDOVER_BYTES_S + TENSOR_S * tensors


def _weight_sync(context: _Context) -> tuple[float, str]:
    """Trained weights to the rollout engine: (seconds, formula)."""
    train = context.assignments[S.ACTOR_TRAIN]
    engine = context.assignments[S.ACTOR_GENERATE]
    shape = context.shape(S.ACTOR_TRAIN)
    nbytes = 2.0 * shape.num_parameters()
    floor = weight_sync_floor_s(shape)
    if set(train.devices) & set(engine.devices):
        gather = 0.0
        if engine.layout != train.layout:
            gpu, network = context.gpu(S.ACTOR_TRAIN), context.network(S.ACTOR_TRAIN)
            group = Group.of(train.layout.world_size, 1, network.gpus_per_node)
            gather = collective_s(gpu, network, "all_gather", group, nbytes)
        return gather + floor, "gather over training ranks, copy into the engine, 0.7 ms a tensor"
    broadcast = nbytes / BROADCAST_BYTES_S - nbytes / HANDOVER_BYTES_S + floor
    return broadcast, "broadcast to separate engines at verl's measured rate, 0.7 ms a tensor"


def _timeline(
    context: _Context, wanted: tuple[ModelStage, ...], times: Mapping[ModelStage, tuple[Part, ...]]
) -> tuple[dict[ModelStage, float], float]:
    """Start of each stage, and the end of the last, when devices run one stage at a time."""
    busy: list[tuple[frozenset[int], float]] = []
    ends: dict[ModelStage, float] = {}
    starts: dict[ModelStage, float] = {}
    for stage in wanted:
        devices = frozenset(context.assignments[stage].devices)
        ready = max((ends[n] for n in _NEEDS[stage] if n in ends), default=0.0)
        if stage is not S.ACTOR_GENERATE and S.ACTOR_GENERATE in ends:
            ready = max(ready, ends[S.ACTOR_GENERATE])
        start = max([ready, *(end for held, end in busy if not held.isdisjoint(devices))])
        end = start + sum(p.value for p in times[stage])
        starts[stage], ends[stage] = start, end
        busy.append((devices, end))
    return starts, max(ends.values())


@dataclasses.dataclass(frozen=True)
class UnitCost:
    """A unit by itself under one assignment: what a planner combines into plans.

    Attributes:
        seconds: all stages of the unit in one iteration, transfers to and from the host included.
        peak_bytes: reserved by the unit at its highest, CUDA context not counted.
        resting_bytes: what stays on the GPU while other units run.
        bounded: whether more memory would make it faster (a rollout's cache).
    """

    seconds: float
    peak_bytes: float
    resting_bytes: float
    bounded: bool = False


def away_knobs(job: JobSpec, stages: tuple[ModelStage, ...], knobs: Knobs) -> Knobs:
    """The knobs of a unit that leaves the GPU while idle, as far as its engine can take it away.

    DeepSpeed's sleep leaves a trained model's weights where they are.
    """
    trains = stages[-1] in (S.ACTOR_TRAIN, S.CRITIC_TRAIN)
    params = not (trains and job.backend == "deepspeed")
    return dataclasses.replace(knobs, offload_params=params, offload_optimizer=trains)


def unit_costs(
    job: JobSpec,
    stages: tuple[ModelStage, ...],
    placed: Placed,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    calibration: Calibration | None = None,
) -> tuple[UnitCost, UnitCost]:
    """Cost of the stages of one unit that is not the rollout: resident, and offloaded when idle.

    The last stage is where the unit's state rests. What offloading adds to resident costs is
    transfers, so both come at once.
    """
    there = Placed(placed.layout, away_knobs(job, stages, placed.knobs))
    stays = unit_cost(job, stages, placed, cluster, workload, calibration)
    context = _unit_context(job, stages, there, cluster, workload)
    moved = sum(
        part.value
        for stage in stages
        for part in _offload_parts(
            context.case(stage, trains=stage in (S.ACTOR_TRAIN, S.CRITIC_TRAIN), sequences=1.0)
        )
    )
    resting = _unit_resting_bytes(context, stages[-1])
    return stays, UnitCost(stays.seconds + moved, stays.peak_bytes, resting)


def _unit_context(
    job: JobSpec,
    stages: tuple[ModelStage, ...],
    placed: Placed,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
) -> _Context:
    return _Context(job, dict.fromkeys(stages, placed), dict.fromkeys(stages, cluster), workload)


def unit_cost(
    job: JobSpec,
    stages: tuple[ModelStage, ...],
    placed: Placed,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    calibration: Calibration | None = None,
) -> UnitCost:
    """Cost of the stages of one unit that is not the rollout, under exactly these knobs."""
    trains = stages[-1] in (S.ACTOR_TRAIN, S.CRITIC_TRAIN)
    context = _unit_context(job, stages, placed, cluster, workload)
    seconds = peak = 0.0
    for stage in stages:
        parts, case = _stage_seconds(context, stage)
        alone = sum(p.value for p in parts)
        seconds += calibration.seconds(stage, placed, alone) if calibration else alone
        # On one layout a pass that trains holds all that one forward does, and more.
        if stage is stages[-1] or not trains:
            held = memory(case)
            high = held.reserved_bytes
            if calibration:
                own = held.allocated_bytes
                high *= calibration.bytes(stage, placed, own) / own
            peak = max(peak, high)
    return UnitCost(seconds, peak, _unit_resting_bytes(context, stages[-1]))


def rollout_cost(
    job: JobSpec,
    placed: Placed,
    cluster: ClusterSpec,
    workload: WorkloadSpec,
    calibration: Calibration | None = None,
) -> UnitCost | None:
    """Generation under one layout, weight sync not counted; None if the engine cannot run."""
    gpu = resolve_gpu(cluster)
    shape = as_shape(job.actor)
    fraction = placed.knobs.rollout_memory_fraction or 0.6
    taken = engine_weight_bytes(shape, placed.layout) + gpu.engine_bytes
    budget = fraction * gpu.memory_bytes - taken
    if budget <= 0:
        return None
    made = rollout(
        gpu,
        resolve_network(cluster),
        shape,
        placed.layout,
        sequences=workload.sequences_per_step,
        prompt=workload.prompt_tokens,
        response=workload.response_tokens,
        cache_budget_bytes=budget,
        samples_per_prompt=workload.samples_per_prompt,
        max_sequences=job.rollout_max_sequences,
        prefix_caching=job.prefix_caching,
    )
    if made is None:
        return None
    seconds = made.seconds
    if calibration is not None:
        seconds = calibration.seconds(S.ACTOR_GENERATE, placed, seconds)
    return UnitCost(seconds, fraction * gpu.memory_bytes, 0.0, made.preempted)
