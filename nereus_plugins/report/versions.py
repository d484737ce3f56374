"""What made a figure: versions, the commit where known, and a fingerprint of the code."""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from pathlib import Path

import numpy as np

import nereus_plugins

PACKAGE = Path(nereus_plugins.__file__).resolve().parent
# Pages and comparisons only read what the rest has computed.
_NO_PART_OF_FIGURES = ("report", "selftest")


def versions() -> dict[str, str]:
    return {
        "nereus-plugins": nereus_plugins.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


@functools.cache
def code_sha256() -> str:
    """Of every file of the package that a simulation can depend on."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] in _NO_PART_OF_FIGURES or path.suffix not in (".py", ".npz", ".yaml"):
            continue
        content = path.read_bytes()
        digest.update(f"{inside.as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


@functools.cache
def commit() -> str | None:
    """Of the repository that the package lies in, "-dirty" where files differ; None without one."""
    try:
        top = _git("rev-parse", "--show-toplevel")
        if Path(top).resolve() != PACKAGE.parent:
            return None  # installed inside of another project
        dirty = "-dirty" if _git("status", "--porcelain", "--untracked-files=no") else ""
        return _git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(PACKAGE), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    return done.stdout.strip()
