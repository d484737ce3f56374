"""What verl's Megatron engine needs on CPU, beyond megatron-core and mbridge themselves."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from nereus_cpu.checks import expect


def patch_engine(engine_module: ModuleType) -> None:
    """Patches what `verl.workers.engine.megatron.transformer_impl` uses."""
    _seed_without_device_count(engine_module)
    _local_attention_mask()


def _seed_without_device_count(engine_module: Any) -> None:
    # verl seeds Megatron's tensor-parallel RNG tracker only where torch sees a CUDA device; the
    # tracker is then empty and building the model fails.
    utils: Any = importlib.import_module("verl.workers.engine.megatron.utils")
    tensor_parallel: Any = importlib.import_module("megatron.core.tensor_parallel")
    for module in (utils, engine_module):
        expect(hasattr(module, "set_random_seed"), f"{module.__name__}.set_random_seed is missing")
    seed_all = utils.set_random_seed

    def set_random_seed(seed: int, *args: Any, **kwargs: Any) -> None:
        seed_all(seed, *args, **kwargs)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    utils.set_random_seed = engine_module.set_random_seed = set_random_seed


def _local_attention_mask() -> None:
    # verl passes a [batch, tokens] padding mask, as TransformerEngine's attention takes it;
    # Megatron's local attention wants [batch, 1, tokens, tokens]. Rows are padded at their end, so
    # the causal mask, which local attention applies when given none, hides padding from every real
    # token.
    module: Any = importlib.import_module("megatron.core.transformer.dot_product_attention")
    expect(hasattr(module, "DotProductAttention"), f"{module.__name__} has no DotProductAttention")
    cls = module.DotProductAttention
    forward = cls.forward

    def forward_causal(
        self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = None
        return forward(self, query, key, value, attention_mask, *args, **kwargs)

    cls.forward = forward_causal
