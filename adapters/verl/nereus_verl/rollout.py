"""The rollout in a plan: how generation is laid out over the job's ranks, and what can change.

All ranks generate. A replica is one server, which takes as many ranks as its layout says, so that
the number of replicas follows from the job's ranks:

    replicas = ranks / (tp * data_parallel_size * pipeline_model_parallel_size of the rollout)

In a plan: `rollout: {tp: 2, memory_fraction: 0.5}`, where what is left out stays, or
`rollout: {replicas: 2}`, from which tp follows; in a global plan the assignment of actor-generate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nereus_plugins.job import Refusal
from nereus_plugins.spec import GlobalPlan, Knobs, Layout, ModelStage, SpecError
from nereus_plugins.spec.record import divisors_text, require, require_int, require_number
from nereus_verl.config import ROLLOUT, check_devices
from nereus_verl.jobconfig import select
from nereus_verl.rollout_backends import BACKENDS, backend_of

PATH = "actor_rollout_ref.rollout"
TP, MEMORY = f"{PATH}.tensor_model_parallel_size", f"{PATH}.gpu_memory_utilization"

FIXED = Refusal(
    "rollouts that change, and ranks that join and leave, with SGLang or TensorRT-LLM, and with "
    "vLLM that is quantised, disaggregated or data-parallel",
    "nereus.schedule: rollout, ranks, dp",
    "ending and launching their engines in a running job has not been tested",
    f"keep the rollout and the number of ranks, or use rollout.name={', '.join(BACKENDS)}",
)


@dataclasses.dataclass(frozen=True)
class RolloutPlan:
    """How the rollout is laid out, and the knob it has.

    Attributes:
        tp, pp: of one replica. dp: data-parallel ranks inside one (verl's data_parallel_size).
        memory_fraction: part of a device's memory that a server may take; None: verl's default, or
            nothing where servers take none.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    memory_fraction: float | None = None

    @property
    def ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.dp * self.pp

    def replicas(self, world: int) -> int:
        return world // self.ranks

    def layout(self, world: int) -> Layout:
        """Of all replicas on `world` ranks."""
        return Layout(tp=self.tp, pp=self.pp, dp=world // (self.tp * self.pp))

    def knobs(self) -> Knobs:
        return Knobs(rollout_memory_fraction=self.memory_fraction)

    def settings(self) -> dict[str, Any]:
        """verl's settings, dotted path to value, that start a rollout like this."""
        out: dict[str, Any] = {TP: self.tp}
        if self.memory_fraction is not None:
            out[MEMORY] = self.memory_fraction
        return out

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "DP": self.dp, "PP": self.pp}
        text = " ".join(f"{n}{size}" for n, size in sizes.items() if n == "TP" or size > 1)
        if self.memory_fraction is not None:
            text += f" with {self.memory_fraction:g} of memory"
        return text


def start_rollout(config: Mapping[str, Any]) -> RolloutPlan:
    """What verl's configuration says."""
    sizes = {"tp": "tensor_model", "dp": "data", "pp": "pipeline_model"}
    backend = backend_of(config)
    unused = backend is not None and not backend.takes_memory_fraction
    memory = None if unused else select(config, MEMORY)
    return RolloutPlan(
        **{name: int(select(config, f"{PATH}.{s}_parallel_size", 1)) for name, s in sizes.items()},
        memory_fraction=None if memory is None else float(memory),
    )


def plan_rollout(
    plan: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    current: RolloutPlan,
    world: int,
    where: str,
) -> RolloutPlan:
    """The rollout after a plan.

    Args:
        plan: as checked by `config.check_plan`. config: verl's. current: before it.
        world: ranks of the job after it. where: the setting, for messages.

    Raises: SpecError naming the setting.
    """
    if "assignments" in plan:
        found = GlobalPlan.from_dict(plan, where=where)
        return global_plan_rollout(found, config=config, current=current, world=world, where=where)
    asked = plan.get(ROLLOUT, {})
    here = f"{where}.{ROLLOUT}"
    for name in ("tp", "replicas"):
        if name in asked:
            require_int(here, name, asked[name])
    tp = int(asked.get("tp", current.tp))
    if "replicas" in asked:
        others = int(asked["replicas"]) * current.dp * current.pp
        require(
            world % others == 0,
            f"{here}: {asked['replicas']} replicas do not divide the job's {world} ranks; they may "
            f"be {divisors_text(world // (current.dp * current.pp))}",
        )
        tp = int(asked.get("tp", world // others))
        require(
            tp * others == world,
            f"{here}: {asked['replicas']} replicas of tp = {tp} take {tp * others} ranks, the job "
            f"has {world}; leave one of them out",
        )
    memory = current.memory_fraction
    if asked.get("memory_fraction") is not None:
        require_number(here, "memory_fraction", asked["memory_fraction"], above=0.0, maximum=1.0)
        memory = float(asked["memory_fraction"])
    target = dataclasses.replace(current, tp=tp, memory_fraction=memory)
    check_rollout(target, config=config, current=current, world=world, where=where)
    return target


def global_plan_rollout(
    plan: GlobalPlan,
    *,
    config: Mapping[str, Any],
    current: RolloutPlan,
    world: int,
    where: str,
) -> RolloutPlan:
    """As `plan_rollout`. Without an assignment of actor-generate the rollout stays."""
    target = current
    assignment = plan.assignments.get(ModelStage.ACTOR_GENERATE)
    if assignment is not None:
        here, layout = f"{where}: {ModelStage.ACTOR_GENERATE}", assignment.layout
        require(
            layout.world_size == world,
            f"{here}: {layout} takes {layout.world_size} ranks; all of the job's {world} generate",
        )
        check_devices(assignment, here)
        target = dataclasses.replace(current, tp=layout.tp)
        memory = assignment.knobs.rollout_memory_fraction
        if memory is not None:
            target = dataclasses.replace(target, memory_fraction=memory)
        possible = target.layout(world)
        require(
            layout == possible,
            f"{here}: {layout} cannot be; of the rollout this adapter changes tp and, with it, the "
            f"number of replicas ({possible})",
        )
    check_rollout(target, config=config, current=current, world=world, where=where)
    return target


def check_rollout(
    target: RolloutPlan,
    *,
    config: Mapping[str, Any],
    current: RolloutPlan,
    world: int,
    where: str,
) -> None:
    """Whether the job's rollout can be `target` on `world` ranks. Arguments as in `plan_rollout`.

    Raises: SpecError.
    """
    if world % target.ranks:
        raise SpecError(
            f"{where}: a rollout replica is made for {target.ranks} ranks ({TP} and its like), "
            f"which do not divide {world}; beside them a plan may say rollout: {{tp: ...}}, with "
            f"tp * data_parallel_size * pipeline_model_parallel_size {divisors_text(world)}"
        )
    if target == current:
        return
    backend = backend_of(config)
    here = f"{where}: the rollout cannot change from {current} to {target}"
    require(backend is not None, f"{here}. {FIXED}")
    assert backend is not None
    require(
        backend.takes_memory_fraction or target.memory_fraction == current.memory_fraction,
        f"{here}: the servers of rollout.name={backend.name} take no memory fraction; leave "
        "memory_fraction out",
    )
    per_node = int(select(config, f"{PATH}.n_gpus_per_node", world))
    require(
        target.ranks <= per_node or target.ranks % per_node == 0,
        f"{here}: a replica of {target.ranks} ranks does not fill whole nodes of {per_node} "
        f"({PATH}.n_gpus_per_node)",
    )
