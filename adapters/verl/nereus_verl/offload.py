"""verl's offloading between stages, around a transition.

Where verl keeps weights or optimizer state in host memory between stages, a transition needs them
on the device; afterwards they go back.
"""

from __future__ import annotations

from typing import Any


def onto_device(engine: Any) -> None:
    """Load what verl offloaded, if it offloads."""
    from verl.utils.device import get_device_name

    _move(engine, get_device_name())


def settle(engine: Any) -> None:
    """Offload again what verl offloads between stages."""
    _move(engine, "cpu")


def _move(engine: Any, device: str) -> None:
    model, optimizer = engine.is_param_offload_enabled, engine.is_optimizer_offload_enabled
    if model or optimizer:
        engine.to(device, model=model, optimizer=optimizer, grad=False)
