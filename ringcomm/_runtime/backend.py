"""Finds the backend of a group, also where torch has wrapped it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def backend_of(group: Any = None, device: torch.device | str = "cpu") -> Any:
    """Return the backend that serves a group's tensors on `device`; of the default group, if None.

    With TORCH_DISTRIBUTED_DEBUG=DETAIL torch puts a wrapper around each backend, and
    `group._get_backend(device)` returns that. The wrapper has none of the backend's own functions.
    Raises RuntimeError where the group has no backend for `device`.
    """
    if group is None:
        group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device(device))
    while isinstance(backend, getattr(dist.distributed_c10d, "_ProcessGroupWrapper", ())):
        backend = backend.wrapped_pg
    return backend
