"""Generator states that belong to the process: kept as they are while a target layout is built."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

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
