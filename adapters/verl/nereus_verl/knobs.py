"""The knobs of a plan: how units' engines work with the state that they have. Nothing moves between
ranks for them.

Batching: verl's training workers read its sizes from their engine's configuration with every call
(fields that verl declares as changeable), so another value holds from the next iteration on. The
sum over micro-batches is normalised by the whole mini-batch, so the number of optimizer steps, what
each of them sees and its loss stay the same; gradients are summed in another order.

Recompute and offload are switched in the live engine (`nereus_verl.live_knobs`) and change no
number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from nereus_plugins.job import Refusal
from nereus_plugins.spec import GlobalPlan, Knobs, ModelStage, SpecError
from nereus_plugins.spec.record import require
from nereus_verl.config import KNOB_FIELDS, OF_TRAINING, SIZES, SWITCHES, UNITS, by_unit
from nereus_verl.jobconfig import UnitConfig, select

STAGES: Mapping[str, tuple[ModelStage, ...]] = {
    "actor": (ModelStage.ACTOR_TRAIN,),
    "critic": (ModelStage.CRITIC_VALUES, ModelStage.CRITIC_TRAIN),
    "ref": (ModelStage.REF_LOGPROB,),
}
ROLLOUT_KNOB = "rollout_memory_fraction"
# Which of a unit's two sizes each stage means. verl's actor computes the old log-probabilities too,
# which are no stage of their own: they follow actor-train.
_USES: Mapping[ModelStage, tuple[str, ...]] = {
    ModelStage.ACTOR_TRAIN: ("train", "infer"),
    ModelStage.CRITIC_TRAIN: ("train",),
    ModelStage.CRITIC_VALUES: ("infer",),
    ModelStage.REF_LOGPROB: ("infer",),
}
FIXED = Refusal(
    "activation offload that changes while the job runs",
    "offload_activations",
    "verl applies them where it builds an engine, and a change has not been built and tested",
    "leave them out of the plan, or start the job with them",
)
NOT_SELECTIVE = Refusal(
    "selective recompute with FSDP2",
    "nereus.schedule: recompute: selective",
    "Hugging Face's models recompute whole layers or nothing",
    "set recompute to full or none",
)
BESIDE_OFFLOADED_ACTIVATIONS = Refusal(
    "recompute that changes beside offloaded activations",
    "model.enable_activation_offload, override_transformer_config.cpu_offloading",
    "layers are wrapped for both of them, or for offloading alone, when an engine is built",
    "switch the offloading of activations off, or leave recompute as it is",
)
OTHER_MODULES = Refusal(
    "selective recompute that changes, of other modules than core_attn",
    "override_transformer_config.recompute_modules",
    "Megatron's layers decide what else they recompute when they are built",
    'set recompute_modules=["core_attn"], or leave recompute as it is',
)
REFERENCE_ON_HOST = Refusal(
    "FSDP2 reference whose weights go to or leave host memory",
    "nereus.schedule: ref: offload_params",
    "verl builds it with FSDP2's CPU offload policy wherever there is an accelerator",
    "leave offload_params of ref out, and name the units that it is for",
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


@dataclasses.dataclass(frozen=True)
class UnitKnobs:
    """The knobs of one unit.

    Attributes:
        batching: how its engine cuts samples into micro-batches.
        recompute: as in `Knobs`; "none" for the reference.
        offload_params: weights (with Megatron gradients too) lie in host memory between stages.
        offload_optimizer: optimizer state lies in host memory between updates.
    """

    batching: Batching
    recompute: str = "none"
    offload_params: bool = False
    offload_optimizer: bool = False

    def knobs(self, stage: ModelStage) -> dict[str, Any]:
        """What it means for `stage`, as fields of `Knobs`."""
        return self.batching.knobs(stage) | {name: getattr(self, name) for name in SWITCHES}

    def to_dict(self) -> dict[str, Any]:
        return self.batching.to_dict() | {name: getattr(self, name) for name in SWITCHES}

    def changes_to(self, new: UnitKnobs) -> list[str]:
        """What differs in `new`, in words."""
        out = []
        if new.batching != self.batching:
            out.append(f"micro-batches of {self.batching} -> {new.batching}")
        for name in SWITCHES:
            before, after = getattr(self, name), getattr(new, name)
            if before != after:
                words = {True: "on", False: "off"}
                out.append(f"{name} {words.get(before, before)} -> {words.get(after, after)}")
        return out


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


_TRANSFORMER = "override_transformer_config"
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


def start_knobs(config: Mapping[str, Any], unit: UnitConfig) -> UnitKnobs:
    """What verl's configuration says."""
    path = unit.engine_path
    trains = unit.name != "ref"
    recompute = "none"
    if trains and unit.strategy == "megatron":
        recompute = str(select(config, f"{path}.{_TRANSFORMER}.recompute_granularity", "none"))
    elif trains and select(config, f"{unit.model_path}.enable_gradient_checkpointing", False):
        recompute = "full"
    # verl keeps an FSDP2 reference in host memory wherever there is an accelerator.
    on_host = unit.strategy == "fsdp2" and select(config, "trainer.device", "cuda") != "cpu"
    return UnitKnobs(
        batching=start_batching(config, unit.name),
        recompute=recompute,
        offload_params=bool(select(config, f"{path}.param_offload", False))
        or (not trains and on_host),
        offload_optimizer=trains and bool(select(config, f"{path}.optimizer_offload", False)),
    )


def fixed_knobs(config: Mapping[str, Any], unit: UnitConfig) -> dict[str, Any]:
    """The knobs that stay as verl's configuration has them, as fields of `Knobs`."""
    offload = unit.name != "ref" and select(
        config, f"{unit.model_path}.enable_activation_offload", False
    )
    return {"offload_activations": bool(offload)}


def recompute_values(config: Mapping[str, Any], unit: UnitConfig, recompute: str) -> dict[str, Any]:
    """verl's values for `recompute`: fields of a Megatron unit's transformer configuration, or of
    an FSDP2 unit's model configuration.

    Full recompute in Megatron is divided as verl's configuration says where that has it, otherwise
    layer by layer.
    """
    if unit.strategy != "megatron":
        return {"enable_gradient_checkpointing": recompute == "full"}
    path = f"{unit.engine_path}.{_TRANSFORMER}"
    method, layers = None, None
    if recompute == "full":
        method = select(config, f"{path}.recompute_method", "uniform")
        layers = select(config, f"{path}.recompute_num_layers", 1)
    return {
        "recompute_granularity": None if recompute == "none" else recompute,
        "recompute_method": method,
        "recompute_num_layers": layers,
    }


def offload_values(unit: UnitConfig, knobs: UnitKnobs) -> dict[str, Any]:
    """verl's values for where a unit's state lies, as fields of its engine's configuration."""
    if unit.name != "ref":
        return {
            "param_offload": knobs.offload_params,
            "optimizer_offload": knobs.offload_optimizer,
        }
    return {"param_offload": knobs.offload_params} if unit.strategy == "megatron" else {}


def unit_values(
    config: Mapping[str, Any], unit: UnitConfig, knobs: UnitKnobs
) -> dict[str, dict[str, Any]]:
    """What a worker sets in a unit's engine (`live_knobs.apply`), by kind."""
    recompute = recompute_values(config, unit, knobs.recompute) if unit.name != "ref" else {}
    return {
        "batching": knobs.batching.engine_values(),
        "recompute": recompute,
        "offload": offload_values(unit, knobs),
    }


def knob_settings(config: Mapping[str, Any], unit: UnitConfig, knobs: UnitKnobs) -> dict[str, Any]:
    """verl's settings, dotted path to value, that start `unit` with `knobs`."""
    out = batching_settings(unit.name, knobs.batching)
    out |= {f"{unit.engine_path}.{k}": value for k, value in offload_values(unit, knobs).items()}
    if unit.name != "ref":
        megatron = unit.strategy == "megatron"
        path = f"{unit.engine_path}.{_TRANSFORMER}" if megatron else unit.model_path
        values = recompute_values(config, unit, knobs.recompute)
        out |= {f"{path}.{name}": value for name, value in values.items()}
    return out


# -- in a plan -----------------------------------------------------------------------------------


def plan_knobs(
    plan: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    units: Mapping[str, UnitConfig],
    current: Mapping[str, UnitKnobs],
    where: str,
) -> dict[str, UnitKnobs]:
    """Unit -> its knobs after a scheduled plan, for the units that the plan says any of.

    Args:
        plan: as checked by `NereusConfig`. config: verl's. units: all of the job's.
        current: before it, by unit.

    Raises: SpecError naming the setting; also for a knob that cannot change.
    """
    if "assignments" in plan:
        found = GlobalPlan.from_dict(plan, where=where)
        return global_plan_knobs(found, config=config, units=units, current=current, where=where)
    for_all = not set(plan) & set(UNITS)
    out: dict[str, UnitKnobs] = {}
    for unit, fields in by_unit(plan, units).items():
        here = f"{where}.{unit}"
        asked = {name: fields[name] for name in KNOB_FIELDS if fields.get(name) is not None}
        if for_all and unit == "ref":  # which has none of that
            asked = {k: v for k, v in asked.items() if k not in OF_TRAINING}
        if not asked:
            continue
        require(
            unit in units,
            f"{here}: this job has no {unit}; its units are {', '.join(units)}",
        )
        for name in asked:
            require(
                name != ROLLOUT_KNOB,
                f"{here}.{name}: a knob of the rollout; write rollout: {{memory_fraction: ...}}",
            )
            require(name in (*SIZES, *SWITCHES), f"{here}.{name}: {FIXED}")
        try:
            knobs = Knobs(**asked)
        except SpecError as error:
            raise SpecError(f"{here}: {error}") from None
        new = current[unit]
        if sized := [name for name in SIZES if name in asked]:
            for stage in STAGES[unit]:
                new = _with_size(new, stage, knobs, f"{here}.{sized[0]}")
        new = dataclasses.replace(new, **{name: asked[name] for name in SWITCHES if name in asked})
        _check_switches(config, units[unit], current[unit], new, here)
        out[unit] = new
    return out


def global_plan_knobs(
    plan: GlobalPlan,
    *,
    config: Mapping[str, Any],
    units: Mapping[str, UnitConfig],
    current: Mapping[str, UnitKnobs],
    where: str,
) -> dict[str, UnitKnobs]:
    """As `plan_knobs`, for the units of which something changes.

    An assignment without knobs leaves all of them as they are. One with knobs gives recompute and
    offload as it has them, and the sizes if it has one.
    """
    out: dict[str, UnitKnobs] = {}
    usual = Knobs()
    for stage, assignment in plan.assignments.items():
        here = f"{where}: {stage}"
        knobs, unit = assignment.knobs, stage.model
        now = Knobs()
        if stage is not ModelStage.ACTOR_GENERATE:
            # Of that one its memory fraction: `rollout.global_plan_rollout`.
            require(
                unit in units,
                f"{here} has no unit in this job; leave it out (the units: {', '.join(units)})",
            )
            now = Knobs(**fixed_knobs(config, units[unit]))
        changing = (*SIZES, *SWITCHES) if stage in _USES else (ROLLOUT_KNOB,)
        for name in KNOB_FIELDS:
            value = getattr(knobs, name)
            if name in changing or value == getattr(usual, name):
                continue
            fixed = name == "offload_activations" and stage in _USES
            require(
                value == getattr(now, name),
                f"{here}: {name} is {getattr(now, name)} and cannot become {value}. {FIXED}"
                if fixed
                else f"{here}: {name} is no knob of this stage; leave it out",
            )
        if stage not in _USES or knobs == usual:
            continue
        before = out.get(unit, current[unit])
        new = before
        if knobs.micro_batch is not None or knobs.token_budget_tokens is not None:
            said = before.batching.knobs(stage)
            if {name: getattr(knobs, name) for name in said} != said:
                new = _with_size(before, stage, knobs, here)
        new = dataclasses.replace(new, **_switches(stage, knobs, units[unit], now=before))
        _check_switches(config, units[unit], current[unit], new, here)
        if new != current[unit]:
            out[unit] = new
    _check_critic(plan, where)
    return out


def _switches(stage: ModelStage, knobs: Knobs, unit: UnitConfig, now: UnitKnobs) -> dict[str, Any]:
    """The fields of `UnitKnobs` that an assignment to `stage` gives."""
    out: dict[str, Any] = {name: getattr(knobs, name) for name in SWITCHES}
    if "train" not in _USES[stage]:
        out = {name: value for name, value in out.items() if name not in OF_TRAINING}
    if unit.name == "ref" and unit.strategy == "fsdp2" and not knobs.offload_params:
        out = {"offload_params": now.offload_params}  # where verl has it
    return out


def _check_critic(plan: GlobalPlan, where: str) -> None:
    stages = [plan.assignments.get(stage) for stage in STAGES["critic"]]
    said = [one.knobs.offload_params for one in stages if one is not None and one.knobs != Knobs()]
    require(
        len(set(said)) < 2,
        f"{where}: critic-values and critic-train share one engine, so offload_params must be the "
        "same in both",
    )


def _check_switches(
    config: Mapping[str, Any], unit: UnitConfig, now: UnitKnobs, new: UnitKnobs, where: str
) -> None:
    """Raises: SpecError where a unit's engine cannot be switched while it lives."""
    if unit.name == "ref":
        for name in OF_TRAINING:
            require(
                getattr(new, name) == getattr(now, name),
                f"{where}.{name}: the reference computes no gradients and has no optimizer; leave "
                f"{name} of ref out",
            )
        changes = unit.strategy == "fsdp2" and new.offload_params != now.offload_params
        require(not changes, f"{where}.offload_params: {REFERENCE_ON_HOST}")
        return
    if new.recompute == now.recompute:
        return
    here = f"{where}.recompute"
    if unit.strategy == "fsdp2":
        require(new.recompute != "selective", f"{here}: {NOT_SELECTIVE}")
        beside = select(config, f"{unit.model_path}.enable_activation_offload", False)
        require(not beside, f"{here}: {BESIDE_OFFLOADED_ACTIVATIONS}")
        return
    path = f"{unit.engine_path}.{_TRANSFORMER}"
    beside = select(config, f"{path}.cpu_offloading", False)
    require(not beside, f"{here}: {BESIDE_OFFLOADED_ACTIVATIONS}")
    modules = list(select(config, f"{path}.recompute_modules", ["core_attn"]))
    selective = "selective" in (now.recompute, new.recompute)
    require(not selective or modules == ["core_attn"], f"{here}: {OTHER_MODULES}")


def _with_size(before: UnitKnobs, stage: ModelStage, knobs: Knobs, where: str) -> UnitKnobs:
    """`before` with the sizes that `knobs` give for `stage`."""
    by_tokens = knobs.token_budget_tokens is not None
    if stage.model == "critic" and not by_tokens:
        raise SpecError(f"{where}: {CRITIC_BY_TOKENS}")
    size = knobs.token_budget_tokens if by_tokens else knobs.micro_batch
    batching = dataclasses.replace(
        before.batching, by_tokens=by_tokens, **dict.fromkeys(_USES[stage], size)
    )
    return dataclasses.replace(before, batching=batching)


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
