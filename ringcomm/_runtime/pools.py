"""Memory that a program registers with a group: pools of torch's allocator, and tensors.

These are methods of the backend. `_C.pyi` explains them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def register_mem_pool(backend: Any, pool: Any, symm: bool = False) -> None:
    segments = _segments_of("register_mem_pool", pool)
    devices = sorted({segment["device"] for segment in segments})
    if len(devices) > 1:
        raise ValueError(
            f"register_mem_pool: the pool has memory on devices {devices}: "
            "a rank uses one device in a group"
        )
    memory = [(segment["address"], segment["total_size"]) for segment in segments]
    device = devices[0] if devices else None
    backend._register_memory("register_mem_pool", {_name_of(pool): memory}, device)


def deregister_mem_pool(backend: Any, pool: Any) -> None:
    _segments_of("deregister_mem_pool", pool)
    _deregister(backend, "deregister_mem_pool", "this pool", _name_of(pool))


def register_tensors(backend: Any, tensors: torch.Tensor | Iterable[torch.Tensor]) -> None:
    some = _list_of("register_tensors", tensors)
    devices = {tensor.device for tensor in some}
    if len(devices) > 1:
        named = " and ".join(sorted(str(device) for device in devices))
        raise ValueError(f"register_tensors: give tensors of one device: these are on {named}")
    index = next((-1 if device.type == "cpu" else device.index for device in devices), None)
    memory = {_at(tensor): [_range_of(tensor)] for tensor in some}
    backend._register_memory("register_tensors", memory, index)


def deregister_tensors(backend: Any, tensors: torch.Tensor | Iterable[torch.Tensor]) -> None:
    some = _list_of("deregister_tensors", tensors)
    for name, tensor in {_at(tensor): tensor for tensor in some}.items():  # views share one
        _deregister(backend, "deregister_tensors", f"a tensor of {list(tensor.shape)}", name)


def _segments_of(asked: str, pool: Any) -> list[dict[str, Any]]:
    snapshot = getattr(pool, "snapshot", None)
    if snapshot is None or not hasattr(pool, "id"):
        kind = type(pool).__name__
        raise TypeError(f"{asked}: give a torch.cuda.MemPool, not {kind}")
    segments: list[dict[str, Any]] = snapshot()
    return segments


def _list_of(asked: str, tensors: Any) -> list[torch.Tensor]:
    if not isinstance(tensors, Iterable):
        raise TypeError(f"{asked}: give tensors, not {type(tensors).__name__}")
    some = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    for tensor in some:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{asked}: give tensors, not {type(tensor).__name__}")
        strided = tensor.layout == torch.strided and not tensor.is_meta
        # FSDP resizes storage to 0.
        if not strided or tensor.numel() == 0 or tensor.untyped_storage().nbytes() == 0:
            raise ValueError(f"{asked}: a tensor of {list(tensor.shape)} has no memory of its own")
    return some


def _name_of(pool: Any) -> str:
    return "pool " + ".".join(str(part) for part in pool.id)  # two numbers, unique in the process


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return its whole storage: other views may use memory that begins there."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _at(tensor: torch.Tensor) -> str:
    return f"tensor {_range_of(tensor)}"


def _deregister(backend: Any, asked: str, what: str, name: str) -> None:
    if not backend._deregister_memory(name):
        raise ValueError(f"{asked}: {what} was not registered with this group")
