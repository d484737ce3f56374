"""Files that a command writes: said before any work where it cannot, and never half there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from nereus_plugins.spec import SpecError
from nereus_plugins.spec.files import owners_only


def check_out(path: Path, option: str) -> None:
    """Raises: SpecError naming `option` where no file can be written to `path`."""
    if path.exists() and not path.is_file():
        # A device is not replaced: for root, it would be gone.
        raise SpecError(f"{option} {path} is there and no plain file: give another name")
    if not path.name or not path.parent.is_dir():
        raise SpecError(f"{option} {path}: {path.parent} is no directory: make it, or give another")
    if not os.access(path.parent, os.W_OK):
        raise SpecError(f"{option} {path}: {path.parent} cannot be written to: give another")


def replace(path: Path, parts: Iterable[str], *, private: bool = False) -> None:
    """Write a text; the file is there whole or as it was before. private: its owner's only.

    Raises: OSError.
    """
    beside = path.with_name(path.name + ".part")
    mode = 0o600 if private else 0o666
    try:
        with open(beside, "w", encoding="utf-8", opener=lambda p, f: os.open(p, f, mode)) as file:
            if private:
                owners_only(file.fileno())
            file.writelines(parts)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
