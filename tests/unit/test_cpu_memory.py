"""The memory budget of a rank on CPU: what is counted, and that it is enforced."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from nereus_cpu import memory
from nereus_cpu.checks import CpuPlatformError

MIB = 1 << 20


class _Engine:
    """As verl's: passes are methods, state is there before the first."""

    def __init__(self, width: int) -> None:
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers)

    def train_batch(self, rows: int) -> float:
        loss = self._forward(rows)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def infer_batch(self, rows: int) -> float:
        with torch.no_grad():
            return self._forward(rows).item()

    def _forward(self, rows: int) -> torch.Tensor:
        width: Any = self.model[0].in_features
        loss: torch.Tensor = self.model(torch.ones(rows, width)).sum()
        return loss


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(memory.VARIABLE, "64")
    module = types.ModuleType("device")
    memory.install(module)
    base: Any = types.ModuleType("base")
    base.BaseEngine = type("BaseEngine", (_Engine,), dict(vars(_Engine)))
    memory.watch_passes(base, module)
    module.engine = base.BaseEngine  # type: ignore[attr-defined]
    return module


def test_state_and_activations_are_counted(device: Any) -> None:
    engine = device.engine(1024)  # weights 16 MiB
    engine.train_batch(1)
    assert 31.5 * MIB <= device.max_memory_allocated() < 40 * MIB  # and as much in gradients
    assert 31.5 * MIB <= device.memory_allocated() < 34 * MIB
    device.reset_peak_memory_stats()
    engine.train_batch(1024)  # inputs of four layers, 4 MiB each, are saved for backward
    assert device.max_memory_allocated() > 32 * MIB + 4 * 4 * MIB
    free, total = device.mem_get_info()
    assert total == 64 * MIB
    assert 28 * MIB < free < 33 * MIB


def test_free_space_in_the_heap_hides_nothing(device: Any) -> None:
    # Blocks too small to be mappings of their own leave a hole below the last, in which the
    # count's search for tensors, and then gradients, find room.
    blocks = [bytearray(60_000) for _ in range(600)]
    del blocks[:-1]
    engine = device.engine(1024)
    engine.train_batch(1)
    assert 31.5 * MIB <= device.memory_allocated() < 34 * MIB


def test_what_does_not_fit_raises_as_on_an_accelerator(device: Any) -> None:
    engine = device.engine(256)
    with pytest.raises(torch.OutOfMemoryError, match=r"the rank has 64.0 MiB"):
        engine.train_batch(1 << 15)
    engine.model.zero_grad()
    engine.train_batch(1)  # it has been given back


def test_a_model_on_the_meta_device_takes_nothing(device: Any) -> None:
    described = torch.empty(1 << 26, device="meta")
    engine = device.engine(256)
    engine.train_batch(1)
    assert device.memory_allocated() < 16 * MIB < described.nbytes


def test_numbers_are_the_same(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    engine = device.engine(256)
    alone = _Engine(256)
    alone.model.load_state_dict(engine.model.state_dict())
    assert engine.train_batch(64) == alone.train_batch(64)
    for a, b in zip(engine.model.parameters(), alone.model.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.equal(b.grad)


def test_inert_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(memory.VARIABLE, raising=False)
    module = types.ModuleType("device")
    memory.install(module)
    base: Any = types.ModuleType("base")
    base.BaseEngine = type("BaseEngine", (_Engine,), dict(vars(_Engine)))
    memory.watch_passes(base, module)
    assert not hasattr(module, "memory_allocated")
    assert base.BaseEngine.train_batch is _Engine.train_batch


@pytest.mark.parametrize("text", ["much", "0", "-3", "nan", "inf"])
def test_a_wrong_budget_is_said_at_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(memory.VARIABLE, text)
    with pytest.raises(CpuPlatformError, match=memory.VARIABLE):
        memory.install(types.ModuleType("device"))
