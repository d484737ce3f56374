"""Which back end of a process group serves a kind of device."""

import pytest

metadata = pytest.importorskip("nereus_plugins.transport.metadata", reason="needs torch")


@pytest.mark.parametrize(
    ("config", "device", "backend"),
    [
        ("nccl", "cuda", "nccl"),
        ("cuda:nccl", "cuda", "nccl"),
        ("cuda:nccl", "cpu", None),
        ("gloo", "cuda", "gloo"),
        ("cpu:gloo,cuda:gloo", "cuda", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cuda:nccl,cpu:gloo", "cuda", "nccl"),
    ],
)
def test_backend_for(config: str, device: str, backend: str | None) -> None:
    assert metadata.backend_for(config, device) == backend
