"""verl's offloading between stages: around a transition, and switched in a live engine.

Where verl keeps weights or optimizer state in host memory between stages, a transition needs them
on the device; afterwards they go back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus_verl import verl_private


def onto_device(engine: Any) -> None:
    """Load what verl offloaded, if it offloads."""
    from verl.utils.device import get_device_name

    _move(engine, get_device_name())


def settle(engine: Any) -> None:
    """Offload again what verl offloads between stages."""
    _move(engine, "cpu")


def switch(engine: Any, values: Mapping[str, bool]) -> None:
    """Have state lie, between stages, where `values` say from now on; it is brought there.

    Args:
        values: "param_offload", and of an engine that trains "optimizer_offload".
    """
    from verl.utils.device import get_device_name

    model, optimizer = engine.is_param_offload_enabled, engine.is_optimizer_offload_enabled
    now_model = values["param_offload"]
    now_optimizer = values.get("optimizer_offload", optimizer)
    verl_private.set_config(engine.engine_config, **values)
    verl_private.set_offload(engine, now_model, now_optimizer)
    back_model, back_optimizer = model and not now_model, optimizer and not now_optimizer
    if back_model or back_optimizer:
        # verl frees the gradients of what it offloads with the weights.
        engine.to(get_device_name(), model=back_model, optimizer=back_optimizer, grad=back_model)
    away_model, away_optimizer = now_model and not model, now_optimizer and not optimizer
    if away_model or away_optimizer:
        engine.to("cpu", model=away_model, optimizer=away_optimizer, grad=away_model)


def _move(engine: Any, device: str) -> None:
    model, optimizer = engine.is_param_offload_enabled, engine.is_optimizer_offload_enabled
    if model or optimizer:
        engine.to(device, model=model, optimizer=optimizer, grad=False)
