"""What mbridge needs on CPU: layer specs without TransformerEngine, and their weights' names."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from nereus_cpu.checks import expect

# TransformerEngine fuses a layer norm into the linear layer behind it; Megatron's local layers keep
# it as a module of its own. mbridge's name tables know the fused names.
_LOCAL_TO_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def fused_name(name: str) -> str:
    """Name of a parameter of a local layer -> its name were the layer TransformerEngine's."""
    for local, fused in _LOCAL_TO_FUSED.items():
        if name.endswith(local):
            return name.removesuffix(local) + fused
    return name


def patch_layer_specs(llm_bridge: ModuleType) -> None:
    """`mbridge.core.llm_bridge`: local layers where mbridge asks for TransformerEngine's."""
    name = "get_gpt_decoder_block_spec"
    expect(hasattr(llm_bridge, name), f"{llm_bridge.__name__}.{name} is missing")
    spec = getattr(llm_bridge, name)

    def local_spec(config: Any, use_transformer_engine: bool = True, **kwargs: Any) -> Any:
        return spec(config, use_transformer_engine=False, **kwargs)

    setattr(llm_bridge, name, local_spec)


def patch_weight_names(bridge: ModuleType) -> None:
    """`mbridge.core.bridge`: names of local layers map like the fused ones."""
    name = "_weight_name_mapping_mcore_to_hf"
    expect(hasattr(bridge.Bridge, name), f"{bridge.__name__}.Bridge.{name} is missing")
    mapping = getattr(bridge.Bridge, name)
    setattr(bridge.Bridge, name, lambda self, local: mapping(self, fused_name(local)))
