"""Waiting for a device without blocking in it."""

import time

import pytest

from nereus_plugins.transport.base import TransportError

transport = pytest.importorskip("nereus_plugins.transport.torch_transport", reason="needs torch")


def test_ends_when_the_device_is_done() -> None:
    answers = iter([False, False, True])
    transport.wait_until(lambda: next(answers), timeout_s=10, peer_failed=lambda: False)
    assert next(answers, None) is None


def test_a_device_that_is_done_wins_over_a_failed_peer() -> None:
    transport.wait_until(lambda: True, timeout_s=10, peer_failed=lambda: True)


def test_a_failed_peer_ends_the_wait() -> None:
    begin = time.monotonic()
    with pytest.raises(TransportError, match="a peer failed"):
        transport.wait_until(lambda: False, timeout_s=60, peer_failed=lambda: True)
    assert time.monotonic() - begin < 10


def test_the_wait_is_bounded_and_names_the_setting() -> None:
    with pytest.raises(TransportError, match=r"timeout_s=0\.2"):
        transport.wait_until(lambda: False, timeout_s=0.2, peer_failed=lambda: False)
