"""One fork server for all these tests, started with what most ranks import: seconds a rank."""

from __future__ import annotations

from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    # Who starts the server decides what it imports, so do that before the first test does.
    forkserver.set_forkserver_preload(["nereus_plugins.selftest.preload"])
    forkserver.ensure_running()
