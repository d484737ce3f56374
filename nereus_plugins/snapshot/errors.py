"""What can be wrong with a snapshot."""

from __future__ import annotations

import errno
from pathlib import Path


class SnapshotError(RuntimeError):
    """A snapshot cannot be taken or used; the message says what to do."""


class DamagedSnapshot(SnapshotError):
    """Files of a snapshot are missing, cut off or changed; the message names the file."""


class OtherModel(SnapshotError):
    """A snapshot is of another model than the units to be filled; names the first tensor."""


class PeerLost(SnapshotError):
    """A rank is gone, or slower than the group's timeout: no snapshot can be completed any more."""


def unreadable(path: Path, error: OSError) -> SnapshotError:
    """What to raise for a file that cannot be read: it is damaged, unless it is this process that
    can open no more files."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return SnapshotError(f"{path}: {error.strerror}; raise the limit of open files (ulimit -n)")
    return DamagedSnapshot(f"{path}: {error.strerror}")
