"""Every name of OpenRLHF that Nereus uses, wrapped once; none of them is a public interface.

All were read in the source of 0.11.2. Other releases of 0.11 are tried; any other is refused.
"""

from __future__ import annotations

import ast
import copy
import math
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

LAUNCHER = "openrlhf.cli.train_ppo_ray"
TESTED, SERIES = "0.11.2", "0.11."


class UnsupportedOpenRlhf(RuntimeError):
    """The installed OpenRLHF is not one whose private names were checked."""


def openrlhf_version() -> str:
    """Raises: UnsupportedOpenRlhf where it is not installed."""
    try:
        return version("openrlhf")
    except PackageNotFoundError:
        raise UnsupportedOpenRlhf(
            f"OpenRLHF is not installed in this environment; install openrlhf=={TESTED}"
        ) from None


def check_version() -> None:
    """Raises: UnsupportedOpenRlhf unless the installed release is of the tested series."""
    found = openrlhf_version()
    if not found.startswith(SERIES):
        raise UnsupportedOpenRlhf(
            f"OpenRLHF {found} is not supported with --nereus.enable; install openrlhf=={TESTED}"
        )


# -- the launcher ------------------------------------------------------------------------------


def run_plain(words: Sequence[str]) -> None:
    """OpenRLHF's launcher as `python -m` would run it."""
    sys.argv = [LAUNCHER, *words]
    runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)


def read_launcher(words: Sequence[str]) -> tuple[Any, Callable[[Any], None]]:
    """(the arguments as OpenRLHF's own parser and checks leave them, its `train` to give them to).

    The parser stands in the launcher's `if __name__ == "__main__":`, which ends with `train(args)`.

    Raises: SystemExit, AssertionError: OpenRLHF's own, where it does not take the arguments;
        UnsupportedOpenRlhf: the launcher does not look like that.
    """
    found = find_spec(LAUNCHER)
    if found is None or found.origin is None:
        raise UnsupportedOpenRlhf(f"{LAUNCHER} was not found")
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"), found.origin)
    last = tree.body.pop()
    if not isinstance(last, ast.If) or "__main__" not in ast.unparse(last.test):
        raise UnsupportedOpenRlhf(f"{found.origin} does not end with its parser")
    module = module_from_spec(found)
    sys.modules[LAUNCHER] = module
    exec(compile(tree, found.origin, "exec"), vars(module))
    train: Callable[[Any], None] = vars(module)["train"]
    taken: list[Any] = []
    vars(module)["train"] = taken.append
    sys.argv = [LAUNCHER, *words]
    parser = ast.Module(body=last.body, type_ignores=[])
    exec(compile(parser, found.origin, "exec"), vars(module))
    vars(module)["train"] = train
    if len(taken) != 1:
        raise UnsupportedOpenRlhf(f"{found.origin} does not end with one call of train(args)")
    return taken[0], train


def use_trainer(trainer: Any) -> None:
    """Have the launcher start `trainer` (with a `remote`) for OpenRLHF's synchronous trainer."""
    from openrlhf.trainer import ppo_trainer

    ppo_trainer.PPOTrainer = trainer


def trainer_class() -> Any:
    """The class inside of OpenRLHF's Ray actor."""
    from openrlhf.trainer.ppo_trainer import PPOTrainer

    return PPOTrainer.__ray_metadata__.modified_class


def group_class() -> Any:
    """The launcher's group of Ray actors."""
    from openrlhf.trainer.ray.launcher import RayActorGroup

    return RayActorGroup


def use_group(make: Callable[..., Any]) -> None:
    """Have the launcher make its groups so."""
    sys.modules[LAUNCHER].RayActorGroup = make  # type: ignore[attr-defined]


class SingleSeats:
    """Placement groups of one bundle each, those on one node side by side: what the launcher takes
    for the one placement group of models that share GPUs.

    Args: count: how many; returns once Ray has them.
    """

    def __init__(self, count: int) -> None:
        import ray

        groups = [ray.util.placement_group([{"GPU": 1, "CPU": 1}]) for _ in range(count)]
        ray.get([group.ready() for group in groups])
        node_of = {
            group.id: ray.util.placement_group_table(group)["bundles_to_node_id"][0]
            for group in groups
        }
        self.groups = sorted(groups, key=lambda group: str(node_of[group.id]))

    def ready(self) -> Any:
        """What the launcher waits for."""
        return [group.ready() for group in self.groups]


def use_single_seats() -> list[Any]:
    """Have the launcher reserve every GPU in a placement group of its own, and each engine's in
    one.

    Returns: the engines' placement groups, once they are started.
    """
    launcher: Any = sys.modules[LAUNCHER]
    engine_groups: list[Any] = []
    create = launcher.create_vllm_engines

    def placement_group(bundles: Sequence[Any], **how: Any) -> SingleSeats:
        return SingleSeats(len(bundles))

    def create_vllm_engines(
        count: int, tp: int, model: str, seed: int, *rest: Any, **more: Any
    ) -> Any:
        engines = []
        for number in range(count):
            with _noting_groups(engine_groups):
                engines += create(1, tp, model, seed + number, *rest, **more)
        return engines

    launcher.placement_group = placement_group
    launcher.create_vllm_engines = create_vllm_engines
    return engine_groups


@contextmanager
def _noting_groups(into: list[Any], within_s: float | None = None) -> Iterator[None]:
    """Inside, placement groups that OpenRLHF makes for engines are added to `into`; RuntimeError
    where Ray does not have one `within_s`, for which OpenRLHF would wait without end."""
    from openrlhf.trainer.ray import vllm_engine

    make = vllm_engine.placement_group

    def placement_group(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        into.append(made)
        if within_s is not None and not made.wait(within_s):
            raise RuntimeError(f"Ray had no GPUs for another engine within {within_s:g} s")
        return made

    vllm_engine.placement_group = placement_group
    try:
        yield
    finally:
        vllm_engine.placement_group = make


# -- the trainer's process ---------------------------------------------------------------------


def groups_of(trainer: Any) -> dict[str, Any]:
    """The groups of a trainer, by the name of their model."""
    groups = {
        "actor": trainer.actor_model_group,
        "critic": trainer.critic_model_group,
        "ref": trainer.reference_model_group,
        "reward": trainer.reward_model_group,
    }
    return {name: group for name, group in groups.items() if group is not None}


def steps_of(trainer: Any) -> int:
    """Steps of the whole run, where every prompt is used; the last of an episode may be on fewer
    than a batch."""
    args = trainer.args
    of_episode = math.ceil(len(trainer.prompts_dataloader) / args.rollout.batch_size)
    return max(1, of_episode * args.train.num_episodes)


def call_worker(handle: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(actor, *args)` in an actor's process; returns Ray's reference to the result.

    By the method that Ray gives every actor: OpenRLHF's model actors have no coroutines, so it runs
    in their one thread.
    """
    return handle.__ray_call__.remote(function, *args)


def gpus_per_actor(args: Any, unit: str) -> float:
    """What the launcher asks of Ray for one rank."""
    return 0.2 if colocated_with(args, unit) != (unit,) else 1


def colocated_with(args: Any, unit: str) -> tuple[str, ...]:
    """The models whose ranks share GPUs with this one's, itself included."""
    if args.train.colocate_all:
        return ("actor", "critic", "ref", "reward")
    if unit in ("actor", "ref") and args.train.colocate_actor_ref:
        return ("actor", "ref")
    if unit in ("critic", "reward") and args.train.colocate_critic_reward:
        return ("critic", "reward")
    return (unit,)


def start_ranks(group: Any, seats: Sequence[Any], share: float) -> list[Any]:
    """The actors of a group as the launcher starts them, one on each placement group.

    Args: share: of a GPU that each takes.
    """
    import ray

    handles: list[Any] = []
    address: tuple[str | None, int | None] = (None, None)
    for rank, seat in enumerate(seats):
        options = _on(group, seat, 0, share)
        handles.append(options.remote(len(seats), rank, *address))
        if rank == 0 and len(seats) > 1:
            address = ray.get(handles[0].get_master_addr_port.remote())
    return handles


def start_actor(group: Any, share: float, placement: Any, bundle: int) -> Any:
    """A further actor of a group's kind, in a bundle of a placement group."""
    # It gets its rank and world as it joins.
    return _on(group, placement, bundle, share).remote(1, 0, "127.0.0.1", 1)


def _on(group: Any, placement: Any, bundle: int, share: float) -> Any:
    """A group's kind of actor, to be started in a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(
        placement_group=placement, placement_group_bundle_index=bundle
    )
    return group.ray_actor_type.options(
        num_cpus=share, num_gpus=share, scheduling_strategy=strategy
    )


def set_size(group: Any, args: Any, unit: str, ranks: int, tp: int) -> None:
    """Tell a group, and the trainer's arguments, how many ranks there are, and how many of them
    have one batch."""
    group.duplicate_actors = args.ds.tensor_parallel_size = tp
    group._num_nodes, group._num_gpus_per_node = 1, ranks
    of_unit = getattr(args, unit)
    of_unit.num_nodes, of_unit.num_gpus_per_node = 1, ranks


# -- vLLM engines ------------------------------------------------------------------------------


def start_engines(
    args: Any, count: int, first: int, engines: list[Any], groups: list[Any], within_s: float
) -> None:
    """Start further vLLM engines as the launcher makes them, until they answer.

    Args:
        first: how many there are; each has a seed of its own.
        engines, groups: what was started, and its placement groups, are added, also where that
            fails. within_s: how long Ray may take to have the GPUs of one.

    Raises: RuntimeError, and Ray's errors.
    """
    import ray

    with _noting_groups(groups, within_s):
        for number in range(first, first + count):
            engines += _start_engines(args, number)
    ray.get([engine.get_num_unfinished_requests.remote() for engine in engines])


def _start_engines(args: Any, number: int) -> list[Any]:
    """The engine of this number."""
    from openrlhf.trainer.ray import create_vllm_engines

    corrected = args.algo.advantage.is_correction_level != "off"
    engines: list[Any] = create_vllm_engines(
        1,
        args.vllm.tensor_parallel_size,
        args.actor.model_name_or_path,
        args.train.seed + number,
        args.train.full_determinism_enable,
        args.vllm.enable_prefix_caching,
        args.vllm.enforce_eager,
        args.data.max_len,
        None,
        args.vllm.gpu_memory_utilization,
        args.vllm.enable_sleep,
        "processed_logprobs" if corrected else None,
        agent_func_path=args.train.agent_func_path,
        remote_rm_url=args.reward.remote_url,
        max_images_per_prompt=args.data.max_images_per_prompt,
    )
    return engines


def set_engines(trainer: Any, engines: Sequence[Any]) -> None:
    """Have the trainer's process generate with these engines."""
    trainer.vllm_engines = trainer.samples_generator.vllm_engines = list(engines)
    trainer.args.vllm.num_engines = len(engines)


def sync_with(worker: Any, engines: Sequence[Any], count: int) -> None:
    """In the actor's processes: weights go to these engines from now on. Rank 0 forms the group."""
    import torch.distributed as dist

    trainer = worker.trainer
    worker.vllm_engines = trainer.vllm_engines = list(engines)
    vllm = worker.strategy.args.vllm
    vllm.num_engines = count
    if dist.get_rank() == 0:
        trainer._init_vllm_sync_group(vllm.sync_backend)


# -- a model actor's process -------------------------------------------------------------------

_ENGINES: Mapping[str, Callable[[Any], Any]] = {
    "actor": lambda worker: worker.actor.model,
    "critic": lambda worker: worker.critic,
    "ref": lambda worker: worker.model.model,
    "reward": lambda worker: worker.model,
}


def engine_of(worker: Any, unit: str) -> Any:
    """The DeepSpeed engine of a model actor."""
    return _ENGINES[unit](worker)


def average_of(worker: Any) -> Any:
    """The DeepSpeed engine of the moving average that an actor keeps of its weights
    (--train.enable_ema), else None."""
    model = getattr(worker, "ema_model", None)
    return None if model is None else model.model


def averaged(worker: Any) -> tuple[int, int]:
    """(how often OpenRLHF was asked to average, how often it is asked in one accumulation: it
    averages at the last)."""
    strategy = worker.strategy
    return strategy.time_steps["ema"], strategy.accumulated_gradient


def set_averaged(worker: Any, asked: int) -> None:
    """Set the first number of `averaged`."""
    worker.strategy.time_steps["ema"] = asked


def strategy_of(worker: Any) -> Any:
    return worker.strategy


def stage_of(worker: Any) -> int:
    """The ZeRO stage that a model actor was built with."""
    stage: int = worker.strategy.stage
    return stage


def sleeps(worker: Any) -> bool:
    """Whether OpenRLHF keeps this model's masters and moments in host memory while it does not
    train (--ds.enable_sleep); those that are not trained have none."""
    return bool(worker.strategy.args.ds.enable_sleep) and hasattr(worker, "offload_states")


def wake(engine: Any) -> None:
    """Bring a sleeping model's state back to the device. Local: OpenRLHF's own `reload_states` ends
    in a barrier, at which peers would wait for a rank that has no room."""
    engine.reload_states()


def put_to_sleep(engine: Any) -> None:
    """The inverse of `wake`, with the kinds of state that OpenRLHF takes; does nothing to what
    sleeps already. Local too."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind

    engine.offload_states(
        include=[Kind.optim_states, Kind.contiguous_grad_buffer, Kind.hp_params, Kind.lp_grads]
    )


def node_address() -> str:
    """The address at which other nodes reach this process."""
    import ray

    return str(ray.util.get_node_ip_address()).strip("[]")


@contextmanager
def environment(rank: int, world: int, address: str, port: int) -> Iterator[None]:
    """Inside, the process's environment names this rank of this world, as DeepSpeed reads it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ[name] for name in names}
    os.environ.update(zip(names, (str(rank), str(world), address, str(port)), strict=True))
    try:
        yield
    finally:
        os.environ.update(before)


def empty_twin(worker: Any) -> Any:
    """An object of a model actor's class with nothing in it."""
    return object.__new__(type(worker))


def build_model(
    twin: Any, args: Any, unit: str, stage: int, tp: int, ranks: int, max_steps: int
) -> None:
    """Have OpenRLHF build a model in the default world, from its own files: what a checkpoint holds
    is not loaded, nothing is synced with vLLM, and it is awake.

    Args:
        twin: as `empty_twin` made it. args: OpenRLHF's. unit: which model. stage: of ZeRO.
        tp: of AutoTP. ranks: of the world. max_steps: of the learning rate's schedule.
    """
    from openrlhf.utils import get_strategy

    args = copy.deepcopy(args)
    args.ckpt.load_enable = False
    sleeps, args.ds.enable_sleep = args.ds.enable_sleep, False
    args.ds.zero_stage, args.ds.tensor_parallel_size = stage, tp
    getattr(args, unit).num_nodes, getattr(args, unit).num_gpus_per_node = 1, ranks
    strategy = get_strategy(args)
    path = getattr(args, "actor" if unit == "ref" else unit).model_name_or_path
    if unit in ("actor", "critic"):
        twin.init_model_from_pretrained(strategy, path, max_steps)
    else:
        twin.init_model_from_pretrained(strategy, path)
    twin.strategy.args.ckpt.load_enable = False
    twin.strategy.args.ds.enable_sleep = sleeps


def adopt(worker: Any, built: Any, unit: str, rank: int, world: int) -> None:
    """Exchange the contents of the two model actors, so that `worker`, which Ray calls, is what was
    built; it keeps what is the process's own.

    The group by which weights reach vLLM is rank 0's, and does not depend on the layout.
    """
    engines = getattr(worker, "vllm_engines", None)
    sync_group = getattr(getattr(worker, "trainer", None), "_model_update_group", None)
    for name in ("_master_addr", "_master_port"):
        setattr(built, name, getattr(worker, name))
    worker.__dict__, built.__dict__ = built.__dict__, worker.__dict__
    worker._rank, worker._world_size = rank, world
    if unit == "actor":
        worker.vllm_engines = worker.trainer.vllm_engines = engines
        worker.checkpoint_states = getattr(built, "checkpoint_states", {})
        if sync_group is not None:
            worker.trainer._model_update_group = sync_group
