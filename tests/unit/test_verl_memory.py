"""Host memory that is left, with and without a container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from nereus_verl.memory import free_host_bytes


def cgroup(folder: Path, limit: str) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("700\n")
    (folder / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    return folder


def test_a_containers_limit_counts_without_its_page_cache(tmp_path: Path) -> None:
    assert free_host_bytes(cgroup(tmp_path, "1000")) == 450
    assert free_host_bytes(cgroup(tmp_path, "600")) == 50


@pytest.mark.parametrize("limited", [True, False])
def test_without_a_limit_the_nodes_memory_counts(tmp_path: Path, limited: bool) -> None:
    folder = cgroup(tmp_path, "max") if limited else tmp_path / "none"
    free = psutil.virtual_memory().available
    assert free_host_bytes(folder) == pytest.approx(free, rel=0.5)
