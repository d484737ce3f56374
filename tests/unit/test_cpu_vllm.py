"""What verl's vLLM rollout needs on CPU, as far as it can be told without vLLM."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from types import ModuleType, SimpleNamespace

import pytest
import torch
from nereus_cpu import vllm
from nereus_cpu.checks import CpuPlatformError


def test_nothing_is_arranged_where_the_cpu_build_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "BUILD", "a-build-that-nobody-has")
    before = list(sys.meta_path)
    vllm.install()
    assert sys.meta_path == before


def test_the_cpu_build_answers_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "BUILD", "pytest")  # any that is installed
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not _is_ours(f)])
    listed = sorted(d.name for d in distributions())
    vllm.install()
    vllm.install()
    assert version("vllm") == f"{version('pytest')}+cpu"
    assert sum(_is_ours(finder) for finder in sys.meta_path) == 1
    assert sorted(d.name for d in distributions()) == listed
    with pytest.raises(PackageNotFoundError):
        version("a-build-that-nobody-has")
    with pytest.raises(ModuleNotFoundError):
        __import__("a_module_that_nobody_has")


def _is_ours(finder: object) -> bool:
    return type(finder).__name__ == "_VllmFinder"


def test_a_linear_layer_computes_with_the_weight_that_it_was_given_last() -> None:
    utils = ModuleType("vllm.model_executor.layers.utils")
    with pytest.raises(CpuPlatformError, match="dispatch_cpu_unquantized_gemm is missing"):
        vllm.keep_weights(utils)
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: None  # type: ignore[attr-defined]
    vllm.keep_weights(utils)
    layer = SimpleNamespace(weight=torch.zeros(3, 2))
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    layer.weight.fill_(1.0)
    out = layer.cpu_linear(torch.ones(1, 2), layer.weight, None)  # type: ignore[attr-defined]
    assert out.tolist() == [[2.0, 2.0, 2.0]]
