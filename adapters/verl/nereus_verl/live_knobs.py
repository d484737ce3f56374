"""Knobs set in a live engine: what the next call, and the next layout built from it, work with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus_verl import offload, verl_private


def apply(engine: Any, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the knobs of one unit in its engine, which no stage is using.

    Args:
        values: "batching" and "offload": fields of the engine's configuration; "recompute": fields
            of its transformer configuration (Megatron) or model configuration (FSDP2). What is
            empty stays (`nereus_verl.knobs.unit_values`).
    """
    verl_private.set_config(engine.engine_config, **values["batching"])
    if values["recompute"]:
        _set_recompute(engine, values["recompute"])
    if values["offload"]:
        offload.switch(engine, values["offload"])


def _set_recompute(engine: Any, fields: Mapping[str, Any]) -> None:
    if engine.engine_config.strategy == "megatron":
        from nereus_plugins.emu.described.megatron_private import set_recompute

        before = engine.engine_config.override_transformer_config
        verl_private.set_config(
            engine.engine_config, override_transformer_config={**before, **fields}
        )
        set_recompute(engine.module, engine.tf_config, **fields)
        return
    verl_private.set_config(engine.model_config, **fields)
    on = fields["enable_gradient_checkpointing"]
    model = engine.module
    if on == model.is_gradient_checkpointing:
        return
    if on:  # as verl does it where it builds an engine
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
