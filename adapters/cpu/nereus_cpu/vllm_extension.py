"""OpenRLHF's extension of vLLM's workers, for vLLM's CPU build. Imported by vLLM, by name."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.utils
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap

from nereus_cpu import vllm as cpu_vllm
from nereus_cpu.gloo_group import form

cpu_vllm.keep_weights(vllm.model_executor.layers.utils)


class CpuWorkerWrap(WorkerWrap):
    """Weights come over gloo, into host memory."""

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "gloo",
        use_ray: bool = False,
    ) -> None:
        rank = torch.distributed.get_rank() + rank_offset
        self._model_update_group = form(master_address, master_port, rank, world_size)

    def update_weight(
        self, name: str, dtype: torch.dtype, shape: Any, empty_cache: bool = False
    ) -> None:
        """Receive one weight and load it."""
        weight = torch.empty(shape, dtype=dtype)
        self._model_update_group.broadcast(weight, src=0)
        self.model_runner.model.load_weights(weights=[(name, weight)])
