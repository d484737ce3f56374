"""What the ranks of a job tell each other about a snapshot: JSON, over a group that is nothing
else's.

A rank that fails says so in its next message instead of leaving its peers waiting for it.
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist

from nereus_plugins.snapshot.errors import SnapshotError
from nereus_plugins.transport.metadata import gather_bytes


def tell(group: dist.ProcessGroup, said: Any, error: str = "") -> list[Any]:
    """What every rank says, by rank. Collective.

    Args: said: JSON-able. error: why this rank cannot go on.

    Raises: SnapshotError: ranks cannot go on; on all ranks alike, with the reason of the first.
        RuntimeError (torch's): a peer is gone.
    """
    parts = [json.loads(p) for p in gather_bytes(json.dumps([said, error]).encode(), group)]
    failed = [f"rank {rank}: {part[1]}" for rank, part in enumerate(parts) if part[1]]
    if failed:
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise SnapshotError(failed[0] + more)
    return [part[0] for part in parts]
