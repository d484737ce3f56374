"""Generator states that belong to the process: kept as they are while a target layout is built, and
written into snapshots."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the default generators afterwards; building a model seeds and draws from them.

    A process keeps its default generators for as long as it is a rank of the job.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)


def seed(value: int) -> None:
    """Seed the default generators of a process that joins."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def states() -> dict[str, Any]:
    """The default generators' states, JSON-able."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    key = legacy["state"]["key"]
    out: dict[str, Any] = {
        "python": [version, _text(np.array(words, dtype=np.uint32)), gauss],
        "numpy": [_text(key), legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]],
        "torch": _text(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_available():
        out["cuda"] = _text(torch.cuda.get_rng_state().numpy())
    return out


def load(said: Mapping[str, Any]) -> None:
    """Take over what `states` said.

    Raises: ValueError, TypeError, KeyError, RuntimeError: that is not what it said.
    """
    version, words, gauss = said["python"]
    key, position, has_gauss, cached = said["numpy"]
    random.setstate((version, tuple(_array(words, np.uint32).tolist()), gauss))
    np.random.set_state(("MT19937", _array(key, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(_array(said["torch"], np.uint8)))
    if "cuda" in said and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(_array(said["cuda"], np.uint8)))


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: Any) -> Any:
    """A copy that can be written to, as torch wants it."""
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
