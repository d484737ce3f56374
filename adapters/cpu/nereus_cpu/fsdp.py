"""What verl's FSDP engine needs on CPU."""

from __future__ import annotations

from types import ModuleType

from nereus_cpu import attention
from nereus_cpu.checks import expect


def patch_engine(engine_module: ModuleType) -> None:
    """Patches `verl.workers.engine.fsdp.transformer_impl`."""
    attention.install()
    # The reference engine asks for CPUOffloadPolicy(pin_memory=True); without an accelerator there
    # is nothing to offload from, and pinning memory fails.
    expect(
        hasattr(engine_module, "CPUOffloadPolicy"),
        f"{engine_module.__name__}.CPUOffloadPolicy is missing",
    )
    engine_module.CPUOffloadPolicy = lambda pin_memory=True: None  # type: ignore[attr-defined]
