"""A memory budget for a rank on CPU, counted and enforced the way an accelerator does it.

    NEREUS_CPU_MEMORY_BUDGET_MIB=256

Without the variable nothing here is active. With it a training rank counts, after every operator of
a training or forward pass of its engines that makes 64 KiB or more, the memory that the process
has: the kernel's own count of its anonymous pages, of which glibc is told to give back at once what
a tensor of 64 KiB or more had. What is there beside tensors when a pass begins (libraries, Ray and
its buffers), garbage collected, is taken from that, so that weights, gradients, optimizer state,
activations, and what a transition left, are what remains; small blocks that are kept for later
count within a pass, as they do in an accelerator's allocator. An operator after which it is above
the budget raises `torch.OutOfMemoryError`. What an operator allocates and gives back within itself
is not seen, nor what a transition holds meanwhile; on an accelerator both would be.

The peak is what verl and Nereus ask the device for (`max_memory_allocated`,
`reset_peak_memory_stats`), and `mem_get_info` has the budget as the device's size. One look takes
some 3 microseconds. Numbers do not change.

The rollout's server is a process of its own and is not counted: on an accelerator it sleeps while
ranks train.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nereus_cpu.checks import CpuPlatformError, expect

VARIABLE = "NEREUS_CPU_MEMORY_BUDGET_MIB"
# Methods of verl's engines that run a pass, an optimizer step included.
_PASSES = ("train_batch", "infer_batch")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_WARM = 512
_LOOK_BYTES = 1 << 16
# Of free heap that is kept, and the size from which a tensor is a mapping of its own.
_KEPT_BYTES = 1 << 16


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


class Counter:
    """Bytes that this process has allocated since `start`, and their peak.

    Args: budget: bytes that may be live; above it, `look` raises.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.peak = 0
        self._begin: int | None = None
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._statm: int | None = None  # descriptor of this process's counts
        self._pid = 0
        self._libc = ctypes.CDLL(None)
        self._libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        self._libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)

    def start(self) -> None:
        """A pass begins: what the process has beside tensors is not counted from now on."""
        first = self._begin is None
        if first:
            # What torch loads, and its libraries keep, from the first watched operator on.
            with _Watched(self), torch.no_grad():
                torch.ones(_WARM, _WARM) @ torch.ones(_WARM, _WARM)
        gc.collect()
        held_bytes = _tensor_bytes()
        # After the search: its list of all objects, megabytes, may be a hole in the heap by now.
        self._libc.malloc_trim(0)
        self._begin = self._process() - held_bytes
        if first:
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
        """Bytes of this process's anonymous pages."""
        if self._statm is None or self._pid != os.getpid():  # a fork has counts of its own
            self._statm, self._pid = os.open("/proc/self/statm", os.O_RDONLY), os.getpid()
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * self._page


class _Watched(TorchDispatchMode):
    """Looks after every operator of this thread; a CPU's backward pass runs in it too."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and _bytes(out) >= _LOOK_BYTES:
            self._counter.look(str(func))
        return out


def _tensor_bytes() -> int:
    """Bytes of the storages of all tensors on CPU that Python knows."""
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = [one for one in gc.get_objects() if type(one) in plain]
    held = [one.untyped_storage() for one in tensors if one.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def _bytes(out: Any) -> int:
    """What an operator's results take, as far as they are tensors."""
    if isinstance(out, torch.Tensor):
        return out.numel() * out.element_size()
    return sum(map(_bytes, out)) if isinstance(out, (list, tuple)) else 0


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
