"""The processes of controllers beside jobs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def controllers(work: Path) -> list[int]:
    """Processes of controllers of the job in `work`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"nereus_plugins.control.live" in words and str(work).encode() in b"".join(words):
                found.append(int(entry.name))
    return found
