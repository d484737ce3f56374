"""Rights of files that hold what a job did."""

from __future__ import annotations

import contextlib
import os


def owners_only(handle: int) -> None:
    """Take rights on an open file from all but its owner, also where it existed with wider ones.

    A file that is somebody else's, or on a file system that keeps no rights, stays as it is: a job
    that can write to it goes on.
    """
    with contextlib.suppress(OSError):
        os.fchmod(handle, 0o600)
