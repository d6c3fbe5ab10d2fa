"""Copies of tensors in host memory that are made while training goes on, and given back at once.

What a step changes before its optimizers do, as buffers, is copied before training goes on. The
rest, parameters and what optimizers keep, stays as it is during the next forward and backward pass:
a thread copies it meanwhile, and the next optimizer waits for the end of that.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Set
from typing import Any

import torch

MAPPED_BYTES = 64 << 10  # a copy from this size on has a mapping of its own


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory in which a tensor lies."""
    return tensor.untyped_storage().data_ptr()


class Snapshot:
    """Copies by name. `later` are the addresses of memory that does not change before `secure`."""

    def __init__(self, tensors: dict[str, torch.Tensor], later: Set[int] = frozenset()) -> None:
        waits = {n: t for n, t in tensors.items() if t.is_cpu and memory_of(t) in later}
        self._copies = {name: _copy(t) for name, t in tensors.items() if name not in waits}
        for device in {t.device for t in tensors.values() if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        # A change in place counts up the version.
        self._left = [(name, tensor, tensor._version) for name, tensor in waits.items()]
        self._secure = threading.Event()

    def finish(self) -> dict[str, Any]:
        """Make the copies that are left; a thread does it. Returns all, and keeps none.

        Raises RuntimeError if a tensor was changed meanwhile.
        """
        copies, self._copies = self._copies, {}
        try:
            for name, tensor, version in self._left:
                copies[name] = _copy(tensor)
                if tensor._version != version:
                    raise RuntimeError(
                        f"{name} was changed before an optimizer's step, and not by one"
                    )
        finally:
            self._secure.set()
            self._left = []
        return copies

    def secure(self) -> None:
        """Wait until every tensor may change."""
        if self._left:
            self._secure.wait()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to host memory; from a device, which may go on with it after a wait for its stream."""
    return _empty_like(tensor).copy_(tensor, non_blocking=tensor.is_cuda)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory that goes back to the system when the last reference to it does.

    malloc keeps some of what is freed. What torch pins for a device it keeps, for the next copy.
    """
    if tensor.is_cuda or tensor.nbytes < MAPPED_BYTES:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host_memory(tensor.nbytes).view(tensor.dtype).view(tensor.shape)


def host_memory(size: int) -> torch.Tensor:
    """Return uint8[size] with a mapping of its own, which ends with the last reference to it."""
    memory = torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)
    return memory[:size]
