"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: writes down how rank 0's engines cut each batch
into micro-batches. Nothing of the job changes: verl's functions are called as they are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from nereus_cpu.post_import import after_import

FILE = "NEREUS_TEST_MICRO_BATCHES"


def environment(file: Path) -> dict[str, str]:
    """The variables that load this module into a job; it writes to `file`."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {FILE: str(file), "VERL_USE_EXTERNAL_MODULES": __name__, "PYTHONPATH": path}


def read(file: Path) -> list[tuple[str, str, int, int]]:
    """(unit, "train" or "infer", samples, micro-batches) of every batch, in order."""
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def _count(module: ModuleType) -> None:
    cls: Any = getattr(module, "FSDPEngine", None) or module.MegatronEngine
    prepare, run = module.prepare_micro_batches, cls.forward_backward_batch  # type: ignore[attr-defined]
    counts: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        micro_batches, indices = prepare(*args, **kwargs)
        counts.append(len(micro_batches))
        return micro_batches, indices

    def watched(engine: Any, data: Any, *args: Any, forward_only: bool = False, **kw: Any) -> Any:
        out = run(engine, data, *args, forward_only=forward_only, **kw)
        unit = "critic" if engine.model_config.model_type == "value_model" else "actor"
        unit = "ref" if engine.engine_config.forward_only else unit
        if os.environ["RANK"] == "0":
            line = (unit, "infer" if forward_only else "train", len(data), counts[-1])
            with open(os.environ[FILE], "a") as file:
                file.write(json.dumps(line) + "\n")
        return out

    module.prepare_micro_batches = counted  # type: ignore[attr-defined]
    cls.forward_backward_batch = watched


# Tests import this file too, beside others that need verl as it is.
if os.environ.get(FILE):
    for _kind in ("fsdp", "megatron"):
        after_import(f"verl.workers.engine.{_kind}.transformer_impl", _count)
