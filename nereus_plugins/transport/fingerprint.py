"""Fingerprints of named tensors: whether two processes hold the same weights, told by few bytes.

A tensor's fingerprint is its type, its shape and a digest of all of its bytes (`checksum`), so
equal fingerprints mean equal bits. A set of tensors is compared name by name, in any order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from nereus_plugins.transport.checksum import digest

_WORD = (1 << 64) - 1


def of_tensor(tensor: torch.Tensor) -> str:
    """Like "float32[64,32]:" and 32 hexadecimal digits; equal on every device."""
    flat = tensor.detach().contiguous().view(-1)
    first, second = digest(flat.view(torch.uint8)).tolist()
    kind, shape = str(tensor.dtype).removeprefix("torch."), ",".join(map(str, tensor.shape))
    return f"{kind}[{shape}]:{first & _WORD:016x}{second & _WORD:016x}"


def of_all(tensors: Mapping[str, str]) -> str:
    """One for a set, of its tensors' fingerprints by name: 32 hexadecimal digits."""
    text = "\n".join(f"{name} {value}" for name, value in sorted(tensors.items()))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """By name in what two sets differ; empty if they are the same."""
    out = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    out += [f"{name} is not of the model" for name in sorted(found.keys() - expected.keys())]
    out += [
        f"{name} is {found[name]}, should be {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    return out
