"""What this adapter can change in a verl job, what is coupled, and what it refuses by name.

Everything is decided from the configuration, before a worker process exists. What is refused has
not been built and tested; a job that uses it is told the setting and the remedy, and does not start
with Nereus on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus_plugins.job import Capabilities, Refusal, StageCapability
from nereus_plugins.spec import Layout, ModelSpec, ModelStage, SpecError
from nereus_verl import jobconfig, knobs, rollout
from nereus_verl.config import SIZES, SWITCHES
from nereus_verl.jobconfig import UnitConfig, select
from nereus_verl.knobs import STAGES, Batching, UnitKnobs
from nereus_verl.rollout_backends import backend_of

FIELDS = {
    "fsdp2": frozenset({"dp", "ulysses", "sharding", "shard_size"}),
    "megatron": frozenset({"tp", "pp", "dp", "sequence_parallel"}),
}


FSDP2_SHARDINGS = ("fsdp", "hsdp")


class Refused(RuntimeError):
    """The job uses something that does not survive a transition. The message lists all of it."""


@dataclass(frozen=True)
class _Rule:
    """One refused feature of a unit: `found` gives the setting and value that ask for it."""

    refusal: Refusal
    found: Callable[[Mapping[str, Any], UnitConfig], bool]


def _engine(key: str, wanted: Callable[[Any], bool]) -> Callable[..., bool]:
    return lambda config, unit: wanted(select(config, f"{unit.engine_path}.{key}"))


def _transformer(*keys: str) -> Callable[..., bool]:
    def found(config: Mapping[str, Any], unit: UnitConfig) -> bool:
        base = f"{unit.engine_path}.override_transformer_config"
        return any(
            select(config, f"{base}.{key}") not in (None, False, "none", "null", [], "")
            for key in keys
        )

    return found


def _optimizer(*keys: str) -> Callable[..., bool]:
    def found(config: Mapping[str, Any], unit: UnitConfig) -> bool:
        base = f"{unit.section}.optim"
        return any(
            bool(select(config, f"{base}.{key}"))
            or bool(select(config, f"{base}.override_optimizer_config.{key}"))
            for key in keys
        )

    return found


def _model(*keys: str) -> Callable[..., bool]:
    return lambda config, unit: any(
        bool(select(config, f"{unit.model_path}.{key}")) for key in keys
    )


def _above_one(value: Any) -> bool:
    return value is not None and int(value) > 1


def _not_adam(config: Mapping[str, Any], unit: UnitConfig) -> bool:
    if unit.name == "ref":
        return False
    name = str(select(config, f"{unit.section}.optim.optimizer", "adam")).lower()
    package = str(select(config, f"{unit.section}.optim.optimizer_impl", "torch.optim"))
    return name not in ("adam", "adamw") or package != "torch.optim"


_DROPOUT = Refusal(
    "dropout with Megatron",
    "override_transformer_config.hidden_dropout, attention_dropout (there, or of the model)",
    "its generator belongs to a rank, but which ranks must draw alike changes with the layout",
    "set both to 0",
)

_RULES: tuple[_Rule, ...] = (
    _Rule(_DROPOUT, _transformer("hidden_dropout", "attention_dropout")),
    _Rule(
        Refusal(
            "engine other than FSDP2 or Megatron",
            "strategy",
            "FSDP1's flat parameters and other engines are not described as boxes",
            "set strategy=fsdp2 or strategy=megatron",
        ),
        lambda config, unit: unit.strategy not in jobconfig.STRATEGY_ENGINE,
    ),
    _Rule(
        Refusal(
            "context parallelism",
            "context_parallel_size, dynamic_context_parallel",
            "splitting one sequence over ranks has not been tested across a transition",
            "set context_parallel_size=1 and dynamic_context_parallel=False",
        ),
        lambda config, unit: (
            _above_one(select(config, f"{unit.engine_path}.context_parallel_size"))
            or bool(select(config, f"{unit.engine_path}.dynamic_context_parallel"))
        ),
    ),
    _Rule(
        Refusal(
            "expert parallelism",
            "expert_model_parallel_size, expert_tensor_parallel_size",
            "moving experts has not been tested",
            "set expert_model_parallel_size=1 and expert_tensor_parallel_size=null",
        ),
        lambda config, unit: (
            _above_one(select(config, f"{unit.engine_path}.expert_model_parallel_size"))
            or _above_one(select(config, f"{unit.engine_path}.expert_tensor_parallel_size"))
        ),
    ),
    _Rule(
        Refusal(
            "virtual pipeline stages",
            "virtual_pipeline_model_parallel_size",
            "a change of the interleaved schedule has not been tested",
            "set virtual_pipeline_model_parallel_size=null",
        ),
        _engine("virtual_pipeline_model_parallel_size", _above_one),
    ),
    _Rule(
        Refusal(
            "uneven pipeline stages",
            "override_transformer_config.num_layers_in_first_pipeline_stage and its like",
            "they fix how layers are split for one number of stages",
            "leave them out and let stages be equal",
        ),
        _transformer(
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "pipeline_model_parallel_layout",
        ),
    ),
    _Rule(
        Refusal(
            "fp8 and fp4",
            "override_transformer_config.fp8",
            "TransformerEngine keeps scaling state that is not a box of a tensor",
            "set override_transformer_config.fp8=null",
        ),
        _transformer("fp8", "fp8_param", "fp4"),
    ),
    _Rule(
        Refusal(
            "captured CUDA graphs",
            "override_transformer_config.cuda_graph_impl, enable_cuda_graph, external_cuda_graph",
            "a captured graph (full_iteration too) holds addresses that a transition frees",
            "set cuda_graph_impl=none and leave the other two out",
        ),
        _transformer("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
    ),
    _Rule(
        Refusal(
            "Megatron-FSDP",
            "use_megatron_fsdp",
            "its shards are not described as boxes",
            "set use_megatron_fsdp=False",
        ),
        _engine("use_megatron_fsdp", bool),
    ),
    _Rule(
        Refusal(
            "parameter gathering overlapped with the next forward",
            "override_ddp_config.overlap_param_gather",
            "it leaves weights stale at the iteration boundary",
            "set override_ddp_config.overlap_param_gather=False",
        ),
        _engine("override_ddp_config.overlap_param_gather", bool),
    ),
    _Rule(
        Refusal(
            "optimizer other than Adam",
            "optim.optimizer, optim.optimizer_impl",
            "only Adam's master weights, two moments and step counters are carried over",
            "set optim.optimizer=adam (Megatron) or optim.optimizer=AdamW with "
            "optim.optimizer_impl=torch.optim (FSDP2)",
        ),
        _not_adam,
    ),
    _Rule(
        Refusal(
            "CPU-offloaded optimizer",
            "optim.override_optimizer_config.optimizer_cpu_offload",
            "its state is updated in host memory and is not described",
            "set optimizer_cpu_offload=False (param_offload and optimizer_offload are supported)",
        ),
        _optimizer("optimizer_cpu_offload"),
    ),
    _Rule(
        Refusal(
            "precision-aware optimizer",
            "optim.use_precision_aware_optimizer",
            "it keeps its state in other types than two fp32 moments",
            "set optim.use_precision_aware_optimizer=False",
        ),
        _optimizer("use_precision_aware_optimizer"),
    ),
    _Rule(
        Refusal(
            "FSDP2's CPU offload policy",
            "fsdp_config.offload_policy",
            "parameters live in host memory only, out of reach of the ranks' transport",
            "set offload_policy=False (param_offload and optimizer_offload are supported)",
        ),
        _engine("offload_policy", bool),
    ),
    _Rule(
        Refusal(
            "LoRA",
            "model.lora_rank, model.lora.rank, model.lora_adapter_path",
            "adapters are not described",
            "set model.lora_rank=0 and model.lora.rank=0",
        ),
        _model("lora_rank", "lora.rank", "lora_adapter_path", "lora.adapter_path"),
    ),
    _Rule(
        Refusal(
            "EMA of the weights",
            "ema",
            "a second copy of the weights would stay in the old layout",
            "leave ema out",
        ),
        lambda config, unit: bool(
            select(config, f"{unit.section}.ema") or select(config, f"{unit.engine_path}.ema")
        ),
    ),
    _Rule(
        Refusal(
            "quantisation-aware training",
            "qat.enable",
            "its observers' state is not described",
            "set qat.enable=False",
        ),
        lambda config, unit: bool(
            select(config, f"{unit.engine_path}.qat.enable")
            or select(config, f"{unit.section}.qat.enable")
        ),
    ),
    _Rule(
        Refusal(
            "multi-token prediction",
            "model.mtp.enable",
            "its extra layers are not described",
            "set model.mtp.enable=False",
        ),
        _model("mtp.enable"),
    ),
    _Rule(
        Refusal(
            "router replay",
            "router_replay.mode",
            "recorded routes belong to the layout that recorded them",
            "set router_replay.mode=disabled",
        ),
        _engine("router_replay.mode", lambda value: value not in (None, "disabled")),
    ),
)

_SHUFFLE = Refusal(
    "shuffled mini-batches where data parallelism changes",
    "actor.shuffle, critic.shuffle",
    "each data-parallel rank shuffles its own part, so steps would see other samples",
    "set actor_rollout_ref.actor.shuffle=False and critic.shuffle=False",
)
_ASYNCHRONOUS = Refusal(
    "asynchronous trainers",
    "trainer.v1.trainer_mode",
    "while generation runs beside training there is no boundary at which all state is at rest",
    "set trainer.v1.trainer_mode=sync",
)
_LEGACY = Refusal(
    "verl's legacy trainer",
    "trainer.use_v1",
    "it has none of the hooks used here",
    "set trainer.use_v1=True",
)
_SFT = Refusal(
    "verl's SFT trainers",
    "verl.trainer.sft_trainer, verl.trainer.sft_trainer_ray",
    "their loop is one function without a hook between steps, and their configuration is another",
    "leave +nereus=on out",
)
_SEPARATE = Refusal(
    "rollout on other GPUs than training",
    "actor_rollout_ref.hybrid_engine",
    "only colocated workers are supported",
    "set actor_rollout_ref.hybrid_engine=True",
)
_MIXED = Refusal(
    "different engines in one job",
    "strategy",
    "actor, critic and reference share one process and one transition",
    "give all of them the same strategy",
)
_MODEL = Refusal(
    "model outside the dense decoder family",
    "model.path",
    "experts, images and other state have not been tested",
    "use a dense text model (llama, mistral, qwen2, qwen3)",
)
_REF_OFFLOAD = (
    "verl keeps the FSDP2 reference in host memory (CPUOffloadPolicy) wherever there is an "
    "accelerator, out of reach of the ranks' transport: its layout stays as it is"
)


def all_refusals() -> tuple[Refusal, ...]:
    """Everything that is refused, whether a job uses it or not."""
    return (
        _ASYNCHRONOUS,
        _LEGACY,
        _SFT,
        _SEPARATE,
        _MIXED,
        _MODEL,
        _SHUFFLE,
        rollout.FIXED,
        knobs.FIXED,
        knobs.NOT_SELECTIVE,
        knobs.BESIDE_OFFLOADED_ACTIVATIONS,
        knobs.OTHER_MODULES,
        knobs.REFERENCE_ON_HOST,
        knobs.CRITIC_BY_TOKENS,
        *(rule.refusal for rule in _RULES),
    )


def refused_by(config: Mapping[str, Any]) -> list[str]:
    """What of `config` is refused: one text each, naming the full setting. Empty when it can run.

    Args:
        config: verl's configuration, resolved, as plain dicts.
    """
    return list(_refused(config))


def _refused(config: Mapping[str, Any]) -> Iterator[str]:
    if not select(config, "trainer.use_v1", False):
        yield str(_LEGACY)
    if select(config, "trainer.v1.trainer_mode", "sync") != "sync":
        yield str(_ASYNCHRONOUS)
    if not select(config, "actor_rollout_ref.hybrid_engine", True):
        yield str(_SEPARATE)
    units = jobconfig.units(config)
    if len({unit.strategy for unit in units.values()}) > 1:
        used = ", ".join(f"{u.section}.strategy={u.strategy}" for u in units.values())
        yield f"{_MIXED} This job has {used}"
    for unit in units.values():
        for rule in _RULES:
            if rule.found(config, unit):
                yield f"{unit.name}: {rule.refusal}"


def changeable(config: Mapping[str, Any]) -> dict[str, UnitConfig]:
    """The units whose layout can change."""
    units = jobconfig.units(config)
    on_accelerator = select(config, "trainer.device", "cuda") != "cpu"
    if "ref" in units and units["ref"].strategy == "fsdp2" and on_accelerator:
        del units["ref"]
    return units


def capabilities(config: Mapping[str, Any], version: str) -> Capabilities:
    """What can be executed in this job."""
    units = jobconfig.units(config)
    moving = changeable(config)
    stages = {
        stage: StageCapability(
            layout_fields=FIELDS[unit.strategy] if name in moving else frozenset(),
            knob_fields=_knob_fields(unit, stage),
        )
        for name, unit in units.items()
        for stage in STAGES[name]
    }
    backend = backend_of(config)
    if backend is not None:
        stages[ModelStage.ACTOR_GENERATE] = StageCapability(
            layout_fields=frozenset({"tp", "dp"}),
            knob_fields=frozenset(
                {"rollout_memory_fraction"} if backend.takes_memory_fraction else ()
            ),
        )
    coupled = tuple(frozenset(STAGES[name]) for name in units if len(STAGES[name]) > 1)
    return Capabilities(
        framework="verl",
        framework_version=version,
        stages=stages,
        coupled=coupled,
        devices_fixed=devices_fixed(config),
        refused=all_refusals(),
        colocated=True,
        dp_divides=math.gcd(*_samples(config).values()),
        least_budget_tokens=_longest(config),
    )


def devices_fixed(config: Mapping[str, Any]) -> bool:
    """Whether the set of ranks must stay as it is."""
    return set(changeable(config)) != set(jobconfig.units(config)) or backend_of(config) is None


def _samples(config: Mapping[str, Any]) -> dict[str, int]:
    """By setting, samples that divide over the data-parallel ranks of a unit."""
    samples = int(select(config, "actor_rollout_ref.rollout.n", 1))
    sizes = {"data.train_batch_size": int(config["data"]["train_batch_size"])}
    for unit in jobconfig.units(config).values():
        if unit.name != "ref":
            setting = f"{unit.section}.ppo_mini_batch_size"
            sizes[setting] = int(config_value(config, setting))
    return {setting: prompts * samples for setting, prompts in sizes.items()}


def _longest(config: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that there can be."""
    return sum(int(config["data"][f"max_{part}_length"]) for part in ("prompt", "response"))


def _knob_fields(unit: UnitConfig, stage: ModelStage) -> frozenset[str]:
    fields = {"token_budget_tokens"} if unit.name == "critic" else set(SIZES)
    if unit.name != "ref":
        fields |= set(SWITCHES) if stage.value.endswith("-train") else {"offload_params"}
    elif unit.strategy == "megatron":
        fields.add("offload_params")
    return frozenset(fields)


# -- checking one transition ---------------------------------------------------------------------


def check_targets(
    config: Mapping[str, Any],
    models: Mapping[str, ModelSpec],
    current: Mapping[str, Layout],
    targets: Mapping[str, Layout],
    where: str,
    leave: Sequence[int] = (),
    unit_knobs: Mapping[str, UnitKnobs] | None = None,
) -> int:
    """Check target layouts against the model, the ranks, and the batch sizes.

    Args:
        models: by unit. current: layout in force, by unit. targets: by unit; others stay.
        where: the setting the targets come from.
        leave: ranks that must leave.
        unit_knobs: of each unit afterwards; None: as verl's configuration says.

    Returns: how many ranks there are afterwards.

    Raises: SpecError naming `where` or verl's setting that is in the way.
    """
    world = _check_ranks(config, current, targets, where, leave)
    units = changeable(config)
    for name, target in targets.items():
        here = f"{where}.{name}"
        if name not in units:
            if target == current[name]:
                continue
            raise SpecError(f"{here}: this unit cannot change. {_REF_OFFLOAD}")
        unit = units[name]
        try:
            target.check(models[name], world)
        except SpecError as error:
            raise SpecError(f"{here}: {error}") from None
        if unit.strategy == "fsdp2" and target.sharding not in FSDP2_SHARDINGS:
            raise SpecError(
                f"{here}: sharding={target.sharding} is not FSDP2's; set sharding to fsdp, or to "
                "hsdp with shard_size"
            )
        changed = _changed(current[name], target)
        if name != "ref" and "dp" in changed and select(config, f"{unit.section}.shuffle"):
            raise SpecError(f"{here}: {_SHUFFLE}")
        for field in changed:
            if field not in FIELDS[unit.strategy]:
                raise SpecError(
                    f"{here}: {field} cannot change from {getattr(current[name], field)} to "
                    f"{getattr(target, field)}; with {unit.strategy} this adapter changes "
                    f"{', '.join(sorted(FIELDS[unit.strategy]))}"
                )
    for name, unit in jobconfig.units(config).items():
        start = knobs.start_batching(config, name)
        cut = start if unit_knobs is None else unit_knobs[name].batching
        if name in targets or cut != start:
            layout = targets.get(name, current[name])
            _check_batches(config, unit, layout, models[name], cut, f"{where}.{name}")
    return world


def _check_ranks(
    config: Mapping[str, Any],
    current: Mapping[str, Layout],
    targets: Mapping[str, Layout],
    where: str,
    leave: Sequence[int],
) -> int:
    """The number of ranks of a plan. Raises: SpecError where units differ, or cannot change it."""
    after = {name: targets.get(name, current[name]) for name in jobconfig.units(config)}
    worlds = {name: layout.world_size for name, layout in after.items()}
    now = next(iter(current.values())).world_size
    world = next(iter(worlds.values()))
    if len(set(worlds.values())) > 1:
        if "ref" in worlds and "ref" not in changeable(config):
            raise SpecError(
                f"{where}: the number of ranks cannot change in this job. {_REF_OFFLOAD}"
            )
        listed = ", ".join(f"{name} {size}" for name, size in worlds.items())
        raise SpecError(
            f"{where}: all units share the job's ranks, this plan gives {listed}; write "
            "`ranks` beside the units, so that those left out follow, or give each a layout of as "
            "many ranks"
        )
    if world == now and not leave:
        return world
    if leave and (max(leave) >= now or len(leave) == now):
        raise SpecError(
            f"{where}.leave: ranks {list(leave)} of {now}, which are 0 to {now - 1}: at least one "
            "of them must stay"
        )
    if backend_of(config) is None:
        raise SpecError(f"{where}: the set of ranks cannot change. {rollout.FIXED}")
    return world


def _changed(old: Layout, new: Layout) -> list[str]:
    names = ("tp", "pp", "dp", "cp", "ep", "etp", "vpp", "ulysses", "sequence_parallel", "sharding")
    return [name for name in names if getattr(old, name) != getattr(new, name)]


def _check_batches(
    config: Mapping[str, Any],
    unit: UnitConfig,
    target: Layout,
    model: ModelSpec,
    batching: Batching,
    where: str,
) -> None:
    dp = target.dp
    samples = int(select(config, "actor_rollout_ref.rollout.n", 1))
    rows = int(config["data"]["train_batch_size"]) * samples

    def divides(value: int, by: int, what: str, setting: str) -> None:
        if value % by:
            raise SpecError(
                f"{where}: {what} = {value} does not divide by {by} in layout {target}; change "
                f"{setting}, or choose another layout"
            )

    divides(rows, dp, "data.train_batch_size * rollout.n", "data.train_batch_size")
    mini = rows
    if unit.name != "ref":
        mini = int(config_value(config, f"{unit.section}.ppo_mini_batch_size")) * samples
        setting = f"{unit.section}.ppo_mini_batch_size"
        divides(mini, dp, f"{setting} * rollout.n", setting)
    longest = _longest(config)
    for use, name, size in knobs.sizes(config, unit.name, batching):
        if not batching.by_tokens:
            share = (mini if use == "train" else rows) // dp
            divides(share, size, "a rank's share of samples", name)
        elif size * target.ulysses < longest:
            raise SpecError(
                f"{where}: in layout {target} a micro-batch holds {size * target.ulysses} tokens, "
                f"a sequence up to {longest}; raise {name} to at least "
                f"{math.ceil(longest / target.ulysses)}"
            )
    if target.ulysses > 1:
        if not select(config, f"{unit.model_path}.use_remove_padding", False):
            raise SpecError(
                f"{where}: ulysses > 1 needs packed sequences; set "
                f"{unit.model_path}.use_remove_padding=True"
            )
        kv = model.num_kv_heads
        if kv % target.ulysses and target.ulysses % kv:
            raise SpecError(
                f"{where}: ulysses = {target.ulysses} and the model's {kv} key-value heads: one "
                "must divide the other"
            )


def config_value(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path. Raises: SpecError where it is not set."""
    value = select(config, path)
    if value is None:
        raise SpecError(f"{path} is not set")
    return value


def check_model(unit: str, hf_config: Mapping[str, Any], *, megatron: bool = False) -> ModelSpec:
    """The unit's model. Raises: Refused, for models that have not been tested."""
    if megatron and hf_config.get("attention_dropout"):
        raise Refused(
            f"{unit}: {_DROPOUT} This model has attention_dropout={hf_config['attention_dropout']}"
        )
    if hf_config.get("vision_config"):
        raise Refused(f"{unit}: {_MODEL} This model takes images")
    try:
        model = ModelSpec.from_hf_config(hf_config, value_head=unit == "critic")
    except SpecError as error:
        raise Refused(f"{unit}: {_MODEL} {error}") from None
    if model.moe is not None:
        raise Refused(f"{unit}: {_MODEL} This model has experts")
    return model
