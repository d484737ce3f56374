"""How ranks learn that the window is over, and what keeps a transition out of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from nereus_verl import background
from nereus_verl.background import Window, obstacle


def test_the_driver_says_that_it_is_over() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (Window(0.5, "127.0.0.1", store.port, f"window.{n}") for n in (1, 2))
    over, other = first.watched(), second.watched()
    assert not over()
    first.end()
    assert over()
    assert not other()


def test_without_a_store_nothing_is_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CONNECT_S", 0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    window = Window(0.5, "127.0.0.1", store.port, "window.1")
    del store
    assert window.watched()()
    window.end()  # says nothing: the ranks do not pause


@pytest.mark.parametrize("what", ["param", "optimizer"])
def test_offloaded_units_wait_for_the_rollout_to_sleep(what: str) -> None:
    engine = SimpleNamespace(is_param_offload_enabled=False, is_optimizer_offload_enabled=False)
    assert obstacle("actor", engine, on_accelerator=True) == ""
    setattr(engine, f"is_{what}_offload_enabled", True)
    assert "actor is kept in host memory" in obstacle("actor", engine, on_accelerator=True)
    assert obstacle("actor", engine, on_accelerator=False) == ""
