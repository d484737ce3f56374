"""The knobs of a plan: how units' engines cut samples into micro-batches. Nothing moves for them.

verl's training workers read these sizes from their engine's configuration with every call (fields
that verl declares as changeable), so another value holds from the next iteration on. The sum over
micro-batches is normalised by the whole mini-batch, so the number of optimizer steps, what each of
them sees and its loss stay the same; gradients are summed in another order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from nereus_plugins.job import Refusal
from nereus_plugins.spec import GlobalPlan, Knobs, ModelStage, SpecError
from nereus_plugins.spec.record import require
from nereus_verl.config import KNOB_FIELDS, SIZES, by_unit
from nereus_verl.jobconfig import UnitConfig, select

STAGES: Mapping[str, tuple[ModelStage, ...]] = {
    "actor": (ModelStage.ACTOR_TRAIN,),
    "critic": (ModelStage.CRITIC_VALUES, ModelStage.CRITIC_TRAIN),
    "ref": (ModelStage.REF_LOGPROB,),
}
# Which of a unit's two sizes each stage means. verl's actor computes the old log-probabilities too,
# which are no stage of their own: they follow actor-train.
_USES: Mapping[ModelStage, tuple[str, ...]] = {
    ModelStage.ACTOR_TRAIN: ("train", "infer"),
    ModelStage.CRITIC_TRAIN: ("train",),
    ModelStage.CRITIC_VALUES: ("infer",),
    ModelStage.REF_LOGPROB: ("infer",),
}
FIXED = Refusal(
    "recompute, offload and rollout memory fraction that change while the job runs",
    "recompute, offload_params, offload_optimizer, offload_activations, rollout_memory_fraction",
    "verl applies them where it builds an engine, and a change has not been built and tested",
    "leave them out of the plan, or start the job with them",
)
CRITIC_BY_TOKENS = Refusal(
    "critic with micro-batches of so many sequences",
    "nereus.schedule: critic: micro_batch",
    "verl's trainer knows no such setting for the critic, which always works by token budget",
    "give the critic token_budget_tokens",
)


@dataclasses.dataclass(frozen=True)
class Batching:
    """How an engine cuts the samples of one data-parallel rank into micro-batches.

    Attributes:
        by_tokens: a micro-batch holds at most so many tokens for each rank of a Ulysses group
            (verl's dynamic batch size); otherwise exactly so many sequences.
        train: tokens or sequences where gradients are computed; None for a unit without training.
        infer: tokens or sequences in forward passes alone: log-probabilities, values.
    """

    by_tokens: bool
    train: int | None
    infer: int | None

    @property
    def field(self) -> str:
        """The field of `Knobs` that its sizes are values of."""
        return "token_budget_tokens" if self.by_tokens else "micro_batch"

    def knobs(self, stage: ModelStage) -> dict[str, Any]:
        """Its size for `stage`, as a field of `Knobs`; empty where it has none."""
        size = getattr(self, _USES[stage][0])
        return {} if size is None else {self.field: size}

    def engine_values(self) -> dict[str, Any]:
        """Fields of verl's engine configuration, by name."""
        size = "max_token_len_per_gpu" if self.by_tokens else "micro_batch_size_per_gpu"
        values = {size: self.train, f"infer_{size}": self.infer}
        return {"use_dynamic_bsz": self.by_tokens} | {
            name: value for name, value in values.items() if value is not None
        }

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        kind = "tokens" if self.by_tokens else "sequences"
        sizes = dict.fromkeys(size for size in (self.train, self.infer) if size is not None)
        return f"{'/'.join(map(str, sizes))} {kind}"


# -- in verl's configuration ---------------------------------------------------------------------

_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))


def setting(unit: str, use: str, by_tokens: bool) -> str:
    """The setting of verl's that a size comes from. Args: use: "train" or "infer"."""
    if unit == "critic":  # one for both: critic.ppo_max_token_len_per_gpu is not read
        return "critic.ppo_infer_max_token_len_per_gpu"
    kind = "max_token_len_per_gpu" if by_tokens else "micro_batch_size_per_gpu"
    if use == "train":
        return f"{_ACTOR}.ppo_{kind}"
    return f"{_ROLLOUT if unit == 'actor' else _REF}.log_prob_{kind}"


_DEFAULTS = {"critic.ppo_infer_max_token_len_per_gpu": 32768}


def start_batching(config: Mapping[str, Any], unit: str) -> Batching:
    """What verl's configuration says."""
    dynamic = {
        "actor": f"{_ACTOR}.use_dynamic_bsz",
        "ref": f"{_REF}.log_prob_use_dynamic_bsz",
    }
    by_tokens = unit == "critic" or bool(select(config, dynamic[unit], False))

    def size(use: str) -> int | None:
        path = setting(unit, use, by_tokens)
        value = select(config, path, _DEFAULTS.get(path))
        return None if value is None else int(value)

    return Batching(by_tokens, None if unit == "ref" else size("train"), size("infer"))


def batching_settings(unit: str, batching: Batching) -> dict[str, Any]:
    """verl's settings, dotted path to value, that start `unit` with `batching`.

    verl's critic starts with one budget for training and values: the one for training is given.
    """
    switches = {
        "actor": (f"{_ACTOR}.use_dynamic_bsz", f"{_ROLLOUT}.log_prob_use_dynamic_bsz"),
        "critic": (),
        "ref": (f"{_REF}.log_prob_use_dynamic_bsz",),
    }[unit]
    out: dict[str, Any] = dict.fromkeys(switches, batching.by_tokens)
    for use in ("infer", "train"):
        size = getattr(batching, use)
        if size is not None:
            out[setting(unit, use, batching.by_tokens)] = size
    return out


def fixed_knobs(config: Mapping[str, Any], unit: UnitConfig) -> dict[str, Any]:
    """The knobs that stay as verl's configuration has them, as fields of `Knobs`."""
    path = unit.engine_path
    trains = unit.name != "ref"
    recompute = "none"
    if trains and unit.strategy == "megatron":
        granularity = select(config, f"{path}.override_transformer_config.recompute_granularity")
        recompute = "none" if granularity is None else str(granularity)
    elif trains and select(config, f"{unit.model_path}.enable_gradient_checkpointing", False):
        recompute = "full"
    # verl keeps an FSDP2 reference in host memory wherever there is an accelerator.
    on_host = unit.strategy == "fsdp2" and select(config, "trainer.device", "cuda") != "cpu"
    return {
        "recompute": recompute,
        "offload_params": bool(select(config, f"{path}.param_offload", False))
        or (not trains and on_host),
        "offload_optimizer": trains and bool(select(config, f"{path}.optimizer_offload", False)),
        "offload_activations": trains
        and bool(select(config, f"{unit.model_path}.enable_activation_offload", False)),
    }


def rollout_knobs(config: Mapping[str, Any]) -> Knobs:
    """The knobs of actor-generate, which stay as they are."""
    fraction = select(config, f"{_ROLLOUT}.gpu_memory_utilization")
    return Knobs(rollout_memory_fraction=None if fraction is None else float(fraction))


# -- in a plan -----------------------------------------------------------------------------------


def plan_batching(
    plan: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    units: Mapping[str, UnitConfig],
    current: Mapping[str, Batching],
    where: str,
) -> dict[str, Batching]:
    """Unit -> how it batches after a scheduled plan, for the units that the plan says it of.

    Args:
        plan: as checked by `NereusConfig`. config: verl's. units: all of the job's.
        current: before it, by unit.

    Raises: SpecError naming the setting; also for a knob that cannot change.
    """
    if "assignments" in plan:
        found = GlobalPlan.from_dict(plan, where=where)
        return global_plan_batching(found, config=config, units=units, current=current, where=where)
    out: dict[str, Batching] = {}
    for unit, fields in by_unit(plan, units).items():
        here = f"{where}.{unit}"
        asked = {name: fields[name] for name in KNOB_FIELDS if fields.get(name) is not None}
        if not asked:
            continue
        require(
            unit in units,
            f"{here}: this job has no {unit}; its units are {', '.join(units)}",
        )
        for name in asked:
            require(name in SIZES, f"{here}.{name}: {FIXED}")
        try:
            knobs = Knobs(**asked)
        except SpecError as error:
            raise SpecError(f"{here}: {error}") from None
        for stage in STAGES[unit]:
            out[unit] = _with(
                out.get(unit, current[unit]), stage, knobs, f"{here}.{next(iter(asked))}"
            )
    return out


def global_plan_batching(
    plan: GlobalPlan,
    *,
    config: Mapping[str, Any],
    units: Mapping[str, UnitConfig],
    current: Mapping[str, Batching],
    where: str,
) -> dict[str, Batching]:
    """As `plan_batching`. A knob that an assignment leaves at its default stays as it is."""
    out: dict[str, Batching] = {}
    usual = Knobs()
    for stage, assignment in plan.assignments.items():
        here = f"{where}: {stage}"
        knobs, unit = assignment.knobs, stage.model
        if stage is ModelStage.ACTOR_GENERATE:
            now = rollout_knobs(config)
        else:
            require(unit in units, f"{here} has no unit in this job")
            now = Knobs(**fixed_knobs(config, units[unit]))
        for name in KNOB_FIELDS:
            value = getattr(knobs, name)
            if (name in SIZES and stage in _USES) or value == getattr(usual, name):
                continue
            require(
                value == getattr(now, name),
                f"{here}: {name} is {getattr(now, name)} and cannot become {value}. {FIXED}",
            )
        if stage in _USES:
            before = out.get(unit, current[unit])
            if knobs.micro_batch is None and knobs.token_budget_tokens is None:
                continue
            if {name: getattr(knobs, name) for name in before.knobs(stage)} != before.knobs(stage):
                out[unit] = _with(before, stage, knobs, here)
    return out


def _with(before: Batching, stage: ModelStage, knobs: Knobs, where: str) -> Batching:
    """`before` with the sizes that `knobs` give for `stage`."""
    by_tokens = knobs.token_budget_tokens is not None
    if stage.model == "critic" and not by_tokens:
        raise SpecError(f"{where}: {CRITIC_BY_TOKENS}")
    size = knobs.token_budget_tokens if by_tokens else knobs.micro_batch
    return dataclasses.replace(before, by_tokens=by_tokens, **dict.fromkeys(_USES[stage], size))


# -- checking ------------------------------------------------------------------------------------


def sizes(
    config: Mapping[str, Any], unit: str, batching: Batching
) -> Iterator[tuple[str, str, int]]:
    """(use, what a message calls the size, the size) of each size in force.

    Raises: SpecError where verl needs a size and its configuration has none.
    """
    started = batching == start_batching(config, unit)
    for use in ("train", "infer"):
        size = getattr(batching, use)
        name = setting(unit, use, batching.by_tokens) if started else batching.field
        if size is None and batching.by_tokens and (use, unit) != ("train", "ref"):
            raise SpecError(f"{name} is not set")
        if size is not None:
            yield use, name, size
