"""What every patch of this package uses: a check that the patched thing looks as expected."""

from __future__ import annotations


class CpuPlatformError(RuntimeError):
    """The CPU platform met a framework version or a setting that it does not support."""


def expect(condition: bool, what: str) -> None:
    """Raises: CpuPlatformError, if a framework does not look as the coming patch assumes."""
    if not condition:
        raise CpuPlatformError(
            f"nereus_cpu: {what}; the installed framework differs from the pinned, tested version "
            "(see requirements/)"
        )
