"""verl's own engines on a few gloo ranks, without Ray: built, trained on made-up batches, moved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nereus_plugins.emu.boxes import Box
from nereus_plugins.emu.described import DescribedUnit
from nereus_plugins.emu.described.base import LocalShard
from nereus_plugins.emu.unit import ElasticUnit
from nereus_plugins.gtg.execute import RankTransition, TransitionOptions
from nereus_plugins.gtg.scalars import RNG
from nereus_plugins.spec import Layout
from nereus_plugins.transport.control import Control

from . import copies

SEQUENCES = 8
TIMEOUT_S = 60.0


def on_cpu(*, nereus: bool = True) -> None:
    """Call first: verl's plugins, and with them the CPU platform, load with verl.

    Args:
        nereus: as in a worker process of a job with Nereus on; else as verl's own.
    """
    os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", TORCHDYNAMO_DISABLE="1")
    if nereus:
        os.environ["NEREUS_WORKER"] = "1"
    import verl.workers.engine  # noqa: F401


def offload_as_beside_an_accelerator() -> None:
    """Have verl's Megatron engines offload where host memory is the device too: a device by another
    name, and no pinned memory."""
    import verl.utils.device as device
    import verl.utils.megatron_utils as utils
    import verl.workers.engine.base as base
    import verl.workers.engine.megatron.transformer_impl as impl

    for module in (device, base, impl):
        module.get_device_name = lambda: "device"

    class Pageable:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            return torch.empty(*args, **kwargs)

    utils.torch = Pageable()


def build(kind: str, model: Path, role: str, layout: Layout, *, offload: bool = False) -> Any:
    """An initialised engine in fp32.

    Args:
        role: "actor", "critic" or "ref".
        offload: keep the optimizer, and FSDP2's weights, in host memory between stages. (Megatron's
            weights are offloaded to pinned memory, which there is none of without an accelerator.)
    """
    from nereus_cpu.attention import NAME
    from nereus_verl.verl_private import set_config
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
    )
    from verl.workers.engine import EngineRegistry

    packed = kind == "fsdp2"
    model_config = HFModelConfig(
        path=str(model),
        use_remove_padding=packed,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": NAME if packed else "sdpa"},
    )
    model_config.model_type = "value_model" if role == "critic" else "language_model"
    common: dict[str, Any] = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "infer_micro_batch_size_per_gpu": 2,
        "use_remove_padding": packed,
        "forward_only": role == "ref",
        "param_offload": offload and packed,
        "optimizer_offload": offload,
    }
    optimizer = {"lr": 1e-3, "total_training_steps": 20, "lr_warmup_steps": 5}
    torch.manual_seed(7)  # the critic's head is not in the pretrained weights
    if packed:
        engine_config = FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            model_dtype="fp32",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
            fsdp_size=layout.shard_size or -1,
            ulysses_sequence_parallel_size=layout.ulysses,
            **common,
        )
        optimizer_config = FSDPOptimizerConfig(**optimizer)
    else:
        engine_config = McoreEngineConfig(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            sequence_parallel=False,
            vanilla_mbridge=True,
            override_transformer_config={
                "sequence_parallel": False,
                "attention_backend": "local",
                "gradient_accumulation_fusion": False,
                "masked_softmax_fusion": False,
                "bias_activation_fusion": False,
                "apply_rope_fusion": False,
                "persist_layer_norm": False,
                "bias_dropout_fusion": False,
                "use_cpu_initialization": True,
            },
            **common,
        )
        # verl offers bf16 and fp16 only; in fp32 two layouts can be compared closely.
        set_config(engine_config, dtype="float32")
        optimizer_config = McoreOptimizerConfig(**optimizer)
    engine = EngineRegistry.new(
        model_type=model_config.model_type,
        backend=engine_config.strategy,
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=optimizer_config,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


@contextmanager
def without_memory_on(rank: int, engine: Any) -> Iterator[None]:
    """Inside, `rank` has no memory left for another optimizer of an engine like this one."""
    cls = type(engine)
    build_optimizer = cls._build_optimizer

    def build(self: Any, *args: Any) -> Any:
        if dist.get_rank() == rank:
            raise MemoryError("none left")
        return build_optimizer(self, *args)

    cls._build_optimizer = build
    try:
        yield
    finally:
        cls._build_optimizer = build_optimizer


def watch_offloading(engines: dict[str, Any]) -> list[tuple[str, bool]]:
    """Every move that engines of these classes make from now on: (to which device, whether all the
    memory of what moves was there at the time)."""
    log: list[tuple[str, bool]] = []
    for cls in {type(engine) for engine in engines.values()}:

        def to(engine: Any, device: str, *args: Any, _to: Any = cls.to, **kwargs: Any) -> None:
            log.append((device, _all_there(engine)))
            _to(engine, device, *args, **kwargs)

        cls.to = to
    return log


def _all_there(engine: Any) -> bool:
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    tensors = [parameter for module in modules for parameter in module.parameters()]
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for state in getattr(part, "optimizer", part).state.values() if part else ():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return all(t.untyped_storage().nbytes() > 0 for t in local if t.numel())


def make_units(kind: str, engines: dict[str, Any]) -> dict[str, ElasticUnit]:
    if kind == "fsdp2":
        from nereus_verl.fsdp_unit import FsdpUnit

        return {name: FsdpUnit(name, engine, TIMEOUT_S) for name, engine in engines.items()}
    from nereus_verl.megatron_unit import MegatronProcess, MegatronUnit

    process = MegatronProcess(TIMEOUT_S)
    return {name: MegatronUnit(name, engine, process) for name, engine in engines.items()}


def make_transition(units: dict[str, ElasticUnit]) -> RankTransition:
    rank, world = dist.get_rank(), dist.get_world_size()
    control = Control(rank, world, timeout_s=TIMEOUT_S)
    options = TransitionOptions(timeout_s=TIMEOUT_S)
    return RankTransition(units, rank=rank, world=world, control=control, options=options)


def move(transition: RankTransition, layout: Layout | dict[str, Layout]) -> None:
    """Args: layout: of all units, or by unit; others stay."""
    targets = layout if isinstance(layout, dict) else dict.fromkeys(transition.units, layout)
    transition.prepare(targets, transition.epoch + 1)
    transition.commit()
    transition.release()


def batch(engine: Any, seed: int) -> Any:
    """This data-parallel rank's part of a global batch of `SEQUENCES` made-up sequences."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 20, (SEQUENCES,), generator=draw).tolist()
    rows = [torch.randint(3, 250, (length,), generator=draw) for length in lengths]
    share = SEQUENCES // engine.get_data_parallel_size()
    first = engine.get_data_parallel_rank() * share
    mine = rows[first : first + share]

    def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": nested(mine),
            "position_ids": nested([torch.arange(len(row)) for row in mine]),
            "loss_mask": nested([torch.ones(len(row)) for row in mine]),
        },
        batch_size=len(mine),
    )
    packed = hasattr(engine, "ulysses_device_mesh")
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=packed,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        global_batch_size=SEQUENCES,
        calculate_entropy=False,
    )
    return data


def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Likelihood, or distance of values to 0.3, per token of the global batch as verl's losses."""
    if "values" in model_output:
        per_token = (_flat(model_output["values"]).float() - 0.3) ** 2
    else:
        # The last token of a sequence is scored against the next sequence's first: leave it out.
        mask = torch.cat(
            [torch.tensor([1.0] * (n - 1) + [0.0]) for n in data["input_ids"].offsets().diff()]
        )
        per_token = -_flat(model_output["log_probs"]).float() * mask
    return per_token.sum() / data["batch_num_tokens"] * data["dp_size"], {}


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.values() if values.is_nested else values


def train(engine: Any, seed: int) -> None:
    with engine.train_mode():
        engine.train_batch(batch(engine, seed), loss)
    engine.lr_scheduler_step()


def exported(engine: Any) -> dict[str, torch.Tensor]:
    """What the rollout would get: whole tensors under Hugging Face names."""
    return {name: t.detach().clone() for name, t in engine.get_per_tensor_param()[0]}


def restore(units: dict[str, ElasticUnit], saved: dict[str, DescribedUnit]) -> None:
    """Put this rank's own snapshots back, in the layout they were taken in."""
    for name, unit in units.items():
        copies.put_back(saved[name], unit.described())
        unit._current.load_scalars(saved[name].scalars)  # type: ignore[attr-defined]


def take(units: dict[str, ElasticUnit]) -> dict[str, DescribedUnit]:
    return {name: copies.take(unit.described()) for name, unit in units.items()}


def addresses(unit: ElasticUnit) -> list[int]:
    """Where the unit's shards lie in memory: other ones once it was built anew."""
    return [shard.view.data_ptr() for shard in unit.described().shards]


def whole(units: dict[str, ElasticUnit]) -> dict[str, dict[str, str]]:
    """By unit and tensor, the digest of the whole tensor, put together from all ranks' parts."""
    from tests.e2e.observe import digests, parts

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts(units))
    return digests(gathered)


def assert_same(a: dict[str, DescribedUnit], b: dict[str, DescribedUnit]) -> None:
    """Bit for bit, but for generators, which belong to places of a layout."""
    for name in b:
        assert len(a[name].shards) == len(b[name].shards)
        for x, y in zip(a[name].shards, b[name].shards, strict=True):
            assert (x.name, x.box) == (y.name, y.box)
            assert x.view.equal(y.view), f"{name} {x.name} {x.box}"
        kept = [{k: v for k, v in x[name].scalars.items() if k != RNG} for x in (a, b)]
        assert kept[0] == kept[1]


def described_alone(engine: Any) -> DescribedUnit:
    """A Megatron engine's state, where there is no Nereus in the process."""
    from megatron.core import parallel_state

    from nereus_plugins.emu.described.megatron import describe_megatron

    return describe_megatron(
        engine.module,
        engine.optimizer,
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        lr_scheduler=engine.lr_scheduler,
    )


def save(units: dict[str, DescribedUnit], path: Path) -> None:
    torch.save(
        {
            name: (
                [(s.name, s.box.offset, s.box.shape, s.global_shape, s.view) for s in unit.shards],
                unit.scalars,
            )
            for name, unit in units.items()
        },
        path,
    )


def load(path: Path) -> dict[str, DescribedUnit]:
    """What `save` wrote."""
    return {
        name: DescribedUnit(
            [LocalShard(s, Box(at, shape), whole, view) for s, at, shape, whole, view in shards],
            scalars,
        )
        for name, (shards, scalars) in torch.load(path, weights_only=True).items()
    }


def restore_alone(engine: Any, saved: DescribedUnit) -> None:
    """Put this rank's own snapshot back into a new engine."""
    from megatron.core import parallel_state

    from nereus_plugins.emu.described.megatron import ensure_optimizer_state, load_scalars

    ensure_optimizer_state(engine.optimizer)
    copies.put_back(saved, described_alone(engine))
    load_scalars(
        saved.scalars,
        engine.module,
        engine.optimizer,
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        lr_scheduler=engine.lr_scheduler,
    )
