"""Reading verl's resolved configuration: units, their engines, batch sizes. Plain data, no verl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nereus_plugins.spec import Layout, SpecError
from nereus_plugins.spec.record import divisors_text
from nereus_verl.config import EngineDefaults

STRATEGY_ENGINE = {"fsdp2": "fsdp", "megatron": "megatron"}


def select(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path, or `default` where a part of it is missing or null."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return default if value is None else value


@dataclass(frozen=True)
class UnitConfig:
    """Where one unit stands in verl's configuration.

    section: of the role, like "critic". engine_path: of its engine. model_path: of its model.
    """

    name: str
    section: str
    strategy: str
    engine_path: str
    model_path: str


def world_size(config: Mapping[str, Any]) -> int:
    return int(config["trainer"]["n_gpus_per_node"]) * int(config["trainer"]["nnodes"])


def uses_critic(config: Mapping[str, Any]) -> bool:
    """As verl decides it: critic.enable, or by the advantage estimator."""
    enabled = select(config, "critic.enable")
    if enabled is not None:
        return bool(enabled)
    return str(select(config, "algorithm.adv_estimator")) == "gae"


def uses_reference(config: Mapping[str, Any]) -> bool:
    return bool(
        select(config, "algorithm.use_kl_in_reward", False)
        or select(config, "actor_rollout_ref.actor.use_kl_loss", False)
    )


def units(config: Mapping[str, Any]) -> dict[str, UnitConfig]:
    """The units of a job, by name, in the order in which transitions take them."""
    out = {"actor": _unit(config, "actor", "actor_rollout_ref.actor", "actor_rollout_ref.model")}
    if uses_critic(config):
        out["critic"] = _unit(config, "critic", "critic", "critic.model")
    if uses_reference(config):
        out["ref"] = _unit(config, "ref", "actor_rollout_ref.ref", "actor_rollout_ref.model")
    return out


def _unit(config: Mapping[str, Any], name: str, section: str, model: str) -> UnitConfig:
    strategy = str(select(config, f"{section}.strategy", ""))
    if strategy == "megatron":
        engine = f"{section}.megatron"
    else:
        engine = "critic.fsdp" if name == "critic" else f"{section}.fsdp_config"
    return UnitConfig(name, section, strategy, engine, model)


def engine_defaults(config: Mapping[str, Any], unit: UnitConfig) -> EngineDefaults:
    """What `unit`'s engine does where a plan says nothing."""
    path = unit.engine_path
    # mbridge turns sequence parallelism on with tp > 1, whatever verl's own setting says.
    vanilla = bool(select(config, f"{path}.vanilla_mbridge", False))
    default = True if vanilla else select(config, f"{path}.sequence_parallel", True)
    override = f"{path}.override_transformer_config.sequence_parallel"
    return EngineDefaults(
        optimizer_sharded=bool(select(config, f"{path}.use_distributed_optimizer", True)),
        sequence_parallel=bool(select(config, override, default)),
    )


def start_layout(config: Mapping[str, Any], unit: UnitConfig) -> Layout:
    """The layout that verl builds `unit` with. Raises: SpecError naming the setting."""
    world = world_size(config)

    def number(key: str, default: int) -> int:
        return int(select(config, f"{unit.engine_path}.{key}", default))

    if unit.strategy == "megatron":
        tp, pp = number("tensor_model_parallel_size", 1), number("pipeline_model_parallel_size", 1)
        _check_divides(
            unit, "tensor_model_parallel_size * pipeline_model_parallel_size", tp * pp, world
        )
        defaults = engine_defaults(config, unit)
        return Layout(
            tp=tp,
            pp=pp,
            dp=world // (tp * pp),
            sequence_parallel=tp > 1 and defaults.sequence_parallel,
            sharding="zero1" if defaults.optimizer_sharded else "none",
        )
    size, ulysses = number("fsdp_size", -1), number("ulysses_sequence_parallel_size", 1)
    _check_divides(unit, "ulysses_sequence_parallel_size", ulysses, world)
    if size < 0 or size >= world:
        return Layout(dp=world // ulysses, ulysses=ulysses, sharding="fsdp")
    _check_divides(unit, "fsdp_size", size, world)
    return Layout(dp=world // ulysses, ulysses=ulysses, sharding="hsdp", shard_size=size)


def _check_divides(unit: UnitConfig, key: str, value: int, world: int) -> None:
    if value < 1 or world % value:
        raise SpecError(
            f"{unit.engine_path}.{key} = {value} must divide the job's {world} ranks; it may be "
            f"{divisors_text(world)}"
        )


def layout_settings(unit: UnitConfig, layout: Layout) -> dict[str, Any]:
    """verl's settings, dotted path to value, that start `unit` in `layout`."""
    path = unit.engine_path
    if unit.strategy == "megatron":
        out: dict[str, Any] = {
            f"{path}.tensor_model_parallel_size": layout.tp,
            f"{path}.pipeline_model_parallel_size": layout.pp,
        }
        if layout.tp > 1:
            out[f"{path}.sequence_parallel"] = layout.sequence_parallel
        return out
    return {
        f"{path}.fsdp_size": -1 if layout.sharding == "fsdp" else layout.shard_size,
        f"{path}.ulysses_sequence_parallel_size": layout.ulysses,
    }
