"""Recompute and offload switched in verl's live engines: they happen, and no bit is another."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nereus_plugins.spec import Layout
from tests.dist.spawn import run_ranks

# Not imported here: a rank imports this module before it says which platform verl is to use.
pytestmark = [
    pytest.mark.skipif(find_spec("verl") is None, reason="needs verl"),
    pytest.mark.full,
]

PATHS = {
    "fsdp2": [Layout(dp=2, sharding="fsdp"), Layout(dp=1, ulysses=2, sharding="fsdp")],
    "megatron": [Layout(dp=2, sharding="zero1"), Layout(tp=2, sharding="zero1")],
}
LAYERS = 2
RECOMPUTE: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp2": {
        "none": {"enable_gradient_checkpointing": False},
        "full": {"enable_gradient_checkpointing": True},
    },
    "megatron": {
        "none": dict.fromkeys(
            ("recompute_granularity", "recompute_method", "recompute_num_layers")
        ),
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "selective": {
            "recompute_granularity": "selective",
            "recompute_method": None,
            "recompute_num_layers": None,
        },
    },
}
# (recompute, weights offloaded, optimizer state offloaded) of one step after the other
STEPS = {
    "fsdp2": [("full", False, False), ("none", True, True), ("full", True, False)],
    "megatron": [
        ("full", False, False),
        ("selective", True, True),
        ("none", False, True),
        ("full", True, False),
    ],
}


def _switched(rank: int, world: int, kind: str, model: Path, path: list[Layout]) -> None:
    from tests.dist import verl_engines as ve

    ve.on_cpu()
    from nereus_verl import live_knobs

    if kind == "megatron":
        ve.offload_as_beside_an_accelerator()
    engines = {role: ve.build(kind, model, role, path[0]) for role in ("actor", "critic")}
    units = ve.make_units(kind, engines)
    transition = ve.make_transition(units)
    for engine in engines.values():
        ve.train(engine, 0)
    start = ve.take(units)
    left_alone = []
    for seed, _ in enumerate(STEPS[kind], start=1):
        for engine in engines.values():
            seen = _train(engine, seed)
            assert seen == (LAYERS, LAYERS if kind == "megatron" else 0), seen
        left_alone.append(ve.take(units))

    ve.restore(units, start)
    for seed, (recompute, weights, optimizer) in enumerate(STEPS[kind], start=1):
        offload = {"param_offload": weights, "optimizer_offload": optimizer}
        for engine in engines.values():
            values = {"batching": {}, "recompute": RECOMPUTE[kind][recompute], "offload": offload}
            live_knobs.apply(engine, values)
            _check_where(kind, engine, weights, optimizer)
        # The next layout, and the one after it, are built with what is in force.
        for layout in (path[1], path[0]):
            ve.move(transition, layout)
            for engine in engines.values():
                _check_where(kind, engine, weights, optimizer)
        for engine in engines.values():
            layers, attentions = _train(engine, seed)
            assert layers == LAYERS * (2 if recompute == "full" else 1)
            if kind == "megatron":
                assert attentions == LAYERS * (1 if recompute == "none" else 2)
            _check_where(kind, engine, weights, optimizer)
        ve.assert_same(ve.take(units), left_alone[seed - 1])
        for unit in units.values():  # which loaded what was offloaded, to be described
            unit.settle()


def _train(engine: Any, seed: int) -> tuple[int, int]:
    """A step; how often a layer ran in its first micro-batch's pass, and core attention."""
    from tests.dist import verl_engines as ve

    count = {"layers": 0, "attentions": 0}

    def counting(name: str) -> Any:
        def hook(*args: Any) -> None:
            count[name] += 1

        return hook

    chunks = engine.module if isinstance(engine.module, list) else [engine.module]
    hooks = []
    for part in (part for chunk in chunks for part in chunk.modules()):
        if hasattr(part, "self_attn") or hasattr(part, "self_attention"):
            hooks.append(part.register_forward_pre_hook(counting("layers")))
        if type(part).__name__ == "DotProductAttention":
            hooks.append(part.register_forward_pre_hook(counting("attentions")))
    ve.train(engine, seed)
    for hook in hooks:
        hook.remove()
    micro_batches = ve.SEQUENCES // engine.get_data_parallel_size() // 2
    return count["layers"] // micro_batches, count["attentions"] // micro_batches


def _check_where(kind: str, engine: Any, weights: bool, optimizer: bool) -> None:
    """What lies in host memory. Without an accelerator FSDP2's weights and optimizer states do in
    any case; of Megatron's weights it is seen, as verl frees the memory that they leave."""
    assert engine.is_param_offload_enabled == engine.engine_config.param_offload == weights
    assert (
        engine.is_optimizer_offload_enabled == engine.engine_config.optimizer_offload == optimizer
    )
    if kind == "megatron":
        for buffer in (buffer for chunk in engine.module for buffer in chunk.buffers):
            assert (buffer.param_data.untyped_storage().nbytes() == 0) == weights
            assert (buffer.grad_data.untyped_storage().nbytes() == 0) == weights


@pytest.mark.parametrize("kind", ["fsdp2", "megatron"])
def test_switches_change_no_bit(kind: str, tmp_path: Path) -> None:
    from nereus_cpu.task import make_task

    model = make_task(tmp_path, layers=LAYERS).model_dir
    run_ranks(_switched, 2, kind, model, PATHS[kind], timeout_s=200.0)
