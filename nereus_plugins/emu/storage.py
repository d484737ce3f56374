"""Park storages in host memory and bring them back, for transitions that are staged.

The tensors stay: a parked storage is resized to nothing and back, so every view, parameter, buffer
and optimizer state that lies in it is valid again, at the same place in it, after `fetch()`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ParkedStorages:
    """Contents of storages, held in host memory (pinned where they came from a CUDA device)."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        # By the storage object's own identity: without memory it has no data pointer.
        self._parked: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        storages = list(storages)
        if any(not storage.resizable() for storage in storages):
            # Before any is given up: a failure half way would lose what is parked already.
            raise RuntimeError(
                "a storage cannot give its memory back: a NumPy array, shared memory or a foreign "
                "buffer lies on it; raise memory_budget_bytes so that nothing has to be parked"
            )
        for storage in storages:
            live = _bytes(storage)
            host = torch.empty(live.shape, dtype=torch.uint8, pin_memory=live.is_cuda)
            host.copy_(live, non_blocking=live.is_cuda)
            self._parked[storage._cdata] = (storage, host)
        _wait(self._storages())  # before the memory is given away
        for storage in self._storages():
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(host.numel() for _, host in self._parked.values())

    def holds(self, view: torch.Tensor) -> bool:
        """Whether the storage of `view` is parked here."""
        return view.untyped_storage()._cdata in self._parked

    def view_of(self, view: torch.Tensor) -> torch.Tensor:
        """What `view`, a tensor in one of these storages, held: a view of the host copy.

        Raises:
            ValueError: the view's storage is not parked here (any more).
        """
        if not self.holds(view):
            raise ValueError(f"a tensor of shape {tuple(view.shape)} lies in no parked storage")
        _, host = self._parked[view.untyped_storage()._cdata]
        at = (view.storage_offset(), view.shape, view.stride())
        return torch.empty(0, dtype=view.dtype).set_(host.untyped_storage(), *at)

    def fetch(self) -> None:
        """Acquire the memory again and copy the contents back. A second call does nothing.

        Raises:
            torch.OutOfMemoryError: the device has no room; storages fetched so far are back, the
                rest stays parked, and calling again continues.
        """
        for key in list(self._parked):
            storage, host = self._parked[key]
            storage.resize_(host.numel())
            _bytes(storage).copy_(host, non_blocking=host.is_pinned())
            _wait([storage])  # before the host copy is dropped
            del self._parked[key]

    def drop(self) -> None:
        """Forget the contents; the storages stay empty. For a source after commit."""
        self._parked.clear()

    def _storages(self) -> list[torch.UntypedStorage]:
        return [storage for storage, _ in self._parked.values()]


def park(storages: Iterable[torch.UntypedStorage]) -> ParkedStorages:
    """Copy storages to host memory and free theirs.

    Args:
        storages: allocations, e.g. `DescribedUnit.storages()`; each one once.

    Raises:
        RuntimeError: one of them cannot be resized; all are then as they were.
    """
    return ParkedStorages(storages)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(storages: Iterable[torch.UntypedStorage]) -> None:
    for device in {s.device for s in storages if s.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
