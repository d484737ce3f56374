"""DeepSpeed on a machine without accelerator."""

from __future__ import annotations

import os


def install() -> None:
    """Have DeepSpeed run on CPU over gloo. Before anything imports it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    from deepspeed.ops import __compatible_ops__

    # Its reduction through shared memory takes the first world of a process for the only one, and
    # is compiled at first use; without it DeepSpeed reduces with gloo.
    __compatible_ops__["deepspeed_shm_comm"] = False
