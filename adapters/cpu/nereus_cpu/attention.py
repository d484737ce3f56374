"""Packed causal attention on CPU, with Ulysses sequence parallelism.

verl removes padding by packing all sequences of a micro-batch into one row and tells sequences
apart by position ids that restart at 0. It supports that, and Ulysses' exchange of sequence and
heads, by patching flash attention only; this is the same on torch's own attention.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nereus_cpu.checks import CpuPlatformError, expect

NAME = "cpu_packed"


def sequence_lengths(position_ids: torch.Tensor) -> list[int]:
    """Of the sequences in [1, tokens] position ids, which restart at 0."""
    starts: list[int] = (position_ids[0] == 0).nonzero()[:, 0].tolist()
    ends = [*starts[1:], position_ids.shape[1]]
    return [end - start for start, end in zip([0, *starts[1:]], ends, strict=True)]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface.

    query: [1, heads, tokens, head_dim]; key, value: [1, kv_heads, tokens, head_dim];
    position_ids: [1, tokens]. With Ulysses, `tokens` is this rank's slice of the sequence.
    Returns [1, tokens, heads, head_dim] and no weights.
    """
    from verl.utils import ulysses

    if position_ids is None:
        raise CpuPlatformError(
            f"attention {NAME!r} needs packed sequences: set use_remove_padding=True, "
            "or attn_implementation=sdpa"
        )
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    sp = ulysses.get_ulysses_sequence_parallel_world_size()
    if sp > 1:
        query, key, value = (
            ulysses.gather_seq_scatter_heads(x, seq_dim=2, head_dim=1) for x in (query, key, value)
        )
        slices = [torch.empty_like(position_ids) for _ in range(sp)]
        dist.all_gather(
            slices,
            position_ids.contiguous(),
            group=ulysses.get_ulysses_sequence_parallel_group(),
        )
        position_ids = torch.cat(slices, -1)
    lengths = sequence_lengths(position_ids)
    qs, ks, vs = (x.split(lengths, dim=2) for x in (query, key, value))
    out = torch.cat(
        [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
            for q, k, v in zip(qs, ks, vs, strict=True)
        ],
        2,
    )
    if sp > 1:
        out = ulysses.gather_heads_scatter_seq(out, seq_dim=2, head_dim=1)
    return out.transpose(1, 2).contiguous(), None


def install() -> None:
    """Registers the attention with transformers, and lets verl's critic use it."""
    from transformers import AutoModelForTokenClassification
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *args, **kwargs: None)

    # verl/utils/model.py:load_valuehead_model names flash_attention_2, whatever the config says.
    bound = AutoModelForTokenClassification.from_pretrained
    expect(hasattr(bound, "__func__"), "AutoModelForTokenClassification.from_pretrained moved")
    load = bound.__func__

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attn_implementation") == "flash_attention_2":
            kwargs["attn_implementation"] = NAME
        return load(cls, *args, **kwargs)

    AutoModelForTokenClassification.from_pretrained = classmethod(from_pretrained)
