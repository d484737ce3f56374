"""A memory budget for a rank on CPU, counted and enforced the way an accelerator does it.

    NEREUS_CPU_MEMORY_BUDGET_MIB=256

Without the variable nothing here is active. With it a training rank counts, after every operator of
a training or forward pass of its engines, the bytes that the process has allocated: glibc's own
count (`mallinfo2`), to the byte, of what is live in heap and mappings. What was there beside
tensors when the first pass began (libraries, Ray) is taken from that, so that weights, gradients,
optimizer state, activations, and what a transition left, are what remains. An operator after which
it is above the budget raises `torch.OutOfMemoryError`. What an operator allocates and gives back
within itself is not seen, nor what a transition holds meanwhile; on an accelerator both would be.

The peak is what verl and Nereus ask the device for (`max_memory_allocated`,
`reset_peak_memory_stats`), and `mem_get_info` has the budget as the device's size. One look takes
some 5 microseconds. Numbers do not change.

The rollout's server is a process of its own and is not counted: on an accelerator it sleeps while
ranks train.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nereus_cpu.checks import CpuPlatformError, expect

VARIABLE = "NEREUS_CPU_MEMORY_BUDGET_MIB"
# Methods of verl's engines that run a pass, and all operators of the optimizer step.
_PASSES = ("train_batch", "infer_batch")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WARM = 512
_KEPT_BYTES = 1 << 20  # of free heap, and the size from which a tensor is a mapping of its own


def budget_bytes() -> int | None:
    """What the environment says; None: no budget. Raises: CpuPlatformError."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        mib = float(text)
    except ValueError:
        mib = 0.0
    if not 0 < mib < 1 << 40:
        raise CpuPlatformError(f"{VARIABLE} must be a number of MiB above 0, got {text!r}")
    return int(mib * (1 << 20))


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class Counter:
    """Bytes that this process has allocated since `start`, and their peak.

    Args: budget: bytes that may be live; above it, `look` raises.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.peak = 0
        self._begin: int | None = None
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallinfo2"):
            raise CpuPlatformError(f"{VARIABLE} takes glibc 2.33 or later, which counts in 64 bits")
        self._info: Callable[[], _MallInfo] = libc.mallinfo2
        self._info.restype = _MallInfo
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)

    def start(self) -> None:
        """Count from now on, unless it does already; tensors that are there count too."""
        if self._begin is None:
            gc.collect()
            # What torch loads, and its libraries keep, from the first watched operator on.
            with _Watched(self), torch.no_grad():
                torch.ones(_WARM, _WARM) @ torch.ones(_WARM, _WARM)
            plain = (torch.Tensor, torch.nn.Parameter)
            held = [one.untyped_storage() for one in gc.get_objects() if type(one) in plain]
            storages = {storage.data_ptr(): storage.nbytes() for storage in held}
            self._begin = self._process() - sum(storages.values())
            self.peak = self.live()

    def live(self) -> int:
        """Bytes now; 0 before `start`."""
        return 0 if self._begin is None else max(self._process() - self._begin, 0)

    def look(self, what: str) -> None:
        """Raises: torch.OutOfMemoryError above the budget; `what` was done last."""
        now = self.live()
        self.peak = max(self.peak, now)
        if now > self.budget:
            raise torch.OutOfMemoryError(
                f"CPU rank out of memory: {now / 2**20:.1f} MiB are allocated after {what}, the "
                f"rank has {self.budget / 2**20:.1f} MiB ({VARIABLE})"
            )

    def reset_peak(self) -> None:
        self.peak = self.live()

    def _process(self) -> int:
        info = self._info()
        return int(info.uordblks) + int(info.hblkhd)


class _Watched(TorchDispatchMode):
    """Looks after every operator of this thread; a CPU's backward pass runs in it too."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._counter.look(str(func))
        return out


def install(device: ModuleType) -> None:
    """Give verl's device module a budget, if the environment has one, and have it counted.

    Raises: CpuPlatformError.
    """
    budget = budget_bytes()
    if budget is None:
        return
    counter = Counter(budget)

    def info(*_: Any) -> tuple[int, int]:
        return max(budget - counter.live(), 0), budget

    vars(device).update(
        memory_allocated=lambda *_: counter.live(),
        memory_reserved=lambda *_: counter.live(),
        max_memory_allocated=lambda *_: counter.peak,
        max_memory_reserved=lambda *_: counter.peak,
        reset_peak_memory_stats=lambda *_: counter.reset_peak(),
        mem_get_info=info,
        nereus_counter=counter,
    )


def watch_passes(base_module: ModuleType, device: ModuleType) -> None:
    """Have the passes of all engines (`verl.workers.engine.base`) watched, where there is a
    budget."""
    counter = vars(device).get("nereus_counter")
    if counter is None:
        return
    engine = base_module.BaseEngine
    for name in _PASSES:
        expect(name in vars(engine), f"verl's BaseEngine has no {name}")
        setattr(engine, name, _watched(vars(engine)[name], counter))


def _watched(run: Any, counter: Counter) -> Any:
    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        counter.start()
        with _Watched(counter):
            return run(*args, **kwargs)

    return watched
