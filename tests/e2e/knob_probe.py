"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: writes down, in rank 0, how often a unit's first
layer runs in one training pass, and what its engine loads and offloads.

Nothing of the job changes: verl's and Megatron's functions are called as they are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from nereus_cpu.post_import import after_import

FILE = "NEREUS_TEST_KNOBS"


def environment(file: Path) -> dict[str, str]:
    """The variables that load this module into a job; it writes to `file`."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {FILE: str(file), "VERL_USE_EXTERNAL_MODULES": __name__, "PYTHONPATH": path}


def read(file: Path) -> list[dict[str, Any]]:
    """Of every batch that a unit trained on or passed forward, in order: {"unit", "training",
    "micro_batches", "forwards", "attention": forwards of the first layer and of its core attention,
    "moved": what the engine loaded or offloaded since the batch before: "model", "optimizer"}."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def _layers(engine: Any) -> tuple[Any, Any]:
    """The first layer, and its core attention where that is a module."""
    if isinstance(engine.module, list):
        layers = [m for c in engine.module for m in c.modules() if hasattr(m, "self_attention")]
        return layers[0], layers[0].self_attention.core_attention
    layers = [m for m in engine.module.modules() if hasattr(m, "gradient_checkpointing")]
    return next(m for m in layers if hasattr(m, "self_attn")), None


def _probe(module: ModuleType) -> None:
    cls: Any = getattr(module, "FSDPEngine", None) or module.MegatronEngine
    prepare, run, to = module.prepare_micro_batches, cls.forward_backward_batch, cls.to  # type: ignore[attr-defined]
    counts: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        micro_batches, indices = prepare(*args, **kwargs)
        counts.append(len(micro_batches))
        return micro_batches, indices

    def moved(
        engine: Any, device: str, model: bool = True, optimizer: bool = True, **kw: Any
    ) -> Any:
        parts = [name for name, is_on in (("model", model), ("optimizer", optimizer)) if is_on]
        engine.__dict__.setdefault("test_moved", set()).update(parts)
        return to(engine, device, model=model, optimizer=optimizer, **kw)

    def watched(engine: Any, data: Any, *args: Any, forward_only: bool = False, **kw: Any) -> Any:
        layer, attention = _layers(engine)
        calls = {"forwards": 0, "attention": 0}

        def count(name: str) -> Any:
            def hook(*args: Any) -> None:
                calls[name] += 1

            return hook

        hooks = [layer.register_forward_pre_hook(count("forwards"))]
        if attention is not None:
            hooks.append(attention.register_forward_pre_hook(count("attention")))
        try:
            out = run(engine, data, *args, forward_only=forward_only, **kw)
        finally:
            for hook in hooks:
                hook.remove()
        unit = "critic" if engine.model_config.model_type == "value_model" else "actor"
        unit = "ref" if engine.engine_config.forward_only else unit
        if os.environ["RANK"] == "0":
            line = {
                "unit": unit,
                "training": not forward_only,
                "micro_batches": counts[-1],
                "moved": sorted(engine.__dict__.pop("test_moved", ())),
                **calls,
            }
            with open(os.environ[FILE], "a") as file:
                file.write(json.dumps(line) + "\n")
        return out

    module.prepare_micro_batches = counted  # type: ignore[attr-defined]
    cls.forward_backward_batch, cls.to = watched, moved


# Tests import this file too, beside others that need verl as it is.
if os.environ.get(FILE):
    for _kind in ("fsdp", "megatron"):
        after_import(f"verl.workers.engine.{_kind}.transformer_impl", _probe)
