"""The names of flash-attn that OpenRLHF imports at module level; flash-attn is for CUDA only.

OpenRLHF needs them for packed samples and ring attention. Attention itself is transformers' own.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

VERSION = "0.0.0+cpu"


def install() -> None:
    """Makes `flash_attn` importable, where it is not installed. Idempotent."""
    if "flash_attn" in sys.modules or find_spec("flash_attn") is not None:
        return
    from einops import rearrange

    padding = {
        "index_first_axis": index_first_axis,
        "pad_input": pad_input,
        "unpad_input": unpad_input,
        "rearrange": rearrange,
    }
    _module("flash_attn", {"__version__": VERSION, "__path__": []})
    _module("flash_attn.bert_padding", padding)
    _module("flash_attn.utils", {"__path__": []})
    _module("flash_attn.utils.distributed", {"all_gather": all_gather})


def _module(name: str, content: dict[str, Any]) -> None:
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, None, is_package="__path__" in content)
    vars(module).update(content)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` of x."""
    return x[indices]


def unpad_input(
    x: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens that `mask` (batch, sequence) keeps, one after another; (tokens, their places,
    where each sequence begins, the longest sequence, the length of each)."""
    places = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    lengths = mask.sum(-1, dtype=torch.int32)
    begins = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[places], places, begins, int(lengths.max()), lengths


def pad_input(x: torch.Tensor, places: torch.Tensor, batch: int, sequence: int) -> torch.Tensor:
    """The inverse of `unpad_input`; zero elsewhere."""
    out = x.new_zeros(batch * sequence, *x.shape[1:])
    return out.index_copy(0, places, x).unflatten(0, (batch, sequence))


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All ranks' x, one after another along the first dim."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)
