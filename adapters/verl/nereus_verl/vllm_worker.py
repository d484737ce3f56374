"""In every process of a vLLM server that holds weights: what it is sent, and how its launch went.

vLLM mixes `WorkerExtension` into its worker in the place of verl's, which it extends. Like
`vllm_private`, it uses what has no public name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from nereus_plugins.transport import fingerprint

# vLLM's methods that make up a launch -> the part.
_PARTS = {
    "load_model": "load",
    "determine_available_memory": "profile",
    "compile_or_warm_up_model": "capture",
}


class WorkerExtension(vLLMColocateWorkerExtension):
    """Its methods are called by vLLM's `collective_rpc`, by name."""

    def __new__(cls, **kwargs: Any) -> Any:
        worker = super().__new__(cls, **kwargs)
        worker.nereus_seconds = {}
        worker.nereus_received = None
        worker.nereus_fill = False
        # On the object: a mixed-in class comes after the worker's own, and may repeat no name.
        for method, part in _PARTS.items():
            setattr(worker, method, _timed(worker.nereus_seconds, part, getattr(worker, method)))
        return worker

    def nereus_watch(self, launched: bool) -> None:
        """Take fingerprints of what the next sync brings.

        Args:
            launched: whether this worker has no weights yet. It is filled with what no weight is,
                so that one which stays unwritten shows; once the first weights come, as until then
                it may sleep, without memory behind its parameters.
        """
        self.nereus_received: dict[str, str] | None = {}
        self.nereus_fill = launched

    def nereus_watched(self) -> dict[str, Any]:
        """End watching. Returns: {"received": fingerprints by the names that were streamed,
        "unwritten": names of parameters that are not (all) written}."""
        received, self.nereus_received = self.nereus_received, None
        parameters = _floats(self.model_runner.model)
        return {
            "received": received or {},
            "unwritten": [name for name, one in parameters if bool(one.isnan().any())],
        }

    def nereus_launch_seconds(self) -> dict[str, float]:
        """By part; "compile" is within "profile" or "capture"."""
        return self.nereus_seconds

    def _update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        if self.nereus_fill:
            self.nereus_fill = False
            for _, parameter in _floats(self.model_runner.model):
                parameter.data.fill_(float("nan"))
        if self.nereus_received is not None:
            for name, tensor in weights:
                self.nereus_received[name] = fingerprint.of_tensor(tensor)
        super()._update_weights(weights, *args, **kwargs)


def _floats(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters that can hold a NaN."""
    return [(name, p) for name, p in model.named_parameters() if p.dtype.is_floating_point]


def _timed(seconds: dict[str, float], part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = method(*args, **kwargs)
        seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began
        compiling = getattr(out, "language_model", None)
        if isinstance(compiling, float):
            seconds["compile"] = compiling
        return out

    return timed
