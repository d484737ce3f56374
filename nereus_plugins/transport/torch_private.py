"""The names of torch.distributed that are not public and have no public counterpart."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d


def clone_default_store() -> dist.Store:
    """A connection of its own to the store behind the default process group.

    Raises ValueError if there is no default group. (`clone` is missing from torch's type stubs,
    `_get_default_store` from its documentation.)
    """
    store: dist.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store
