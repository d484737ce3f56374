"""Nereus: change the parallel layout of a live RL post-training job between its iterations."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded on first use: importing the package stays quick.
    if name == "estimate":
        from nereus_plugins.cost.estimate import estimate

        return estimate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
