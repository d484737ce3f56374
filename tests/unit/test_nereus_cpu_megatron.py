"""The CPU shim for Megatron-core: what it rewrites, and when it stays away."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from nereus_cpu import megatron


def _example(kind: str = "cuda") -> object:
    def inner() -> tuple[str, ...]:
        return ("torch.cuda.FloatTensor", "cuda", "cudagraph")

    return kind, inner(), kind in {"cuda", "cpu"}


def test_constants_are_rewritten_in_nested_code_and_nothing_else() -> None:
    code = megatron.rewrite_constants(_example.__code__)
    changed = type(_example)(code, globals(), "changed", ("x",))
    assert changed() == ("x", ("torch.FloatTensor", "cpu", "cudagraph"), False)
    assert megatron.rewrite_constants(("cuda", 1, None)) == ("cpu", 1, None)


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing with CUDA")
def test_it_refuses_to_come_too_late() -> None:
    out = _python(
        "import sys, types\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "import nereus_cpu.megatron as shim\n"
        "try: shim.install()\n"
        "except RuntimeError as error: print(error)"
    )
    assert "call install() first" in out


def test_it_stays_away_where_cuda_is_present() -> None:
    out = _python(
        "import sys, torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "import nereus_cpu.megatron as shim\n"
        "before = list(sys.meta_path)\n"
        "print(shim.install(), sys.meta_path == before)"
    )
    assert out == "False True"
