"""Loaded into a job by VERL_USE_EXTERNAL_MODULES: vLLM's workers drop the weights that they get."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nereus_cpu.post_import import after_import

FIRST_LOST = "NEREUS_TEST_VLLM_FIRST_LOST"


def environment(first_lost: Mapping[int, int]) -> dict[str, str]:
    """The variables that load this module into a job.

    first_lost: tensor-parallel size of a server -> the first of a worker's syncs whose weights are
        lost, from 1.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {
        FIRST_LOST: json.dumps(first_lost),
        "VERL_USE_EXTERNAL_MODULES": __name__,
        "PYTHONPATH": path,
    }


def _lose_weights(module: ModuleType) -> None:
    extension: Any = module.vLLMColocateWorkerExtension
    receive, load = extension.update_weights_from_ipc, extension._update_weights
    first_lost: dict[str, int] = json.loads(os.environ[FIRST_LOST])

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nereus_syncs = getattr(self, "nereus_syncs", 0) + 1
        receive(self, *args, **kwargs)

    def load_or_lose(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.nereus_syncs < first_lost[str(self.parallel_config.tensor_parallel_size)]:
            load(self, *args, **kwargs)

    extension.update_weights_from_ipc, extension._update_weights = counted, load_or_lose


# Tests import this file too.
if os.environ.get(FIRST_LOST):
    after_import("verl.workers.rollout.vllm_rollout.utils", _lose_weights)
