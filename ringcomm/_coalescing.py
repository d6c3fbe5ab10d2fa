"""Keeps torch's coalescing by thread for our groups, and ends it where its block raises.

torch notes per group, in `_world.pg_coalesce_state`, that a coalescing is under way, and takes that
note back only at the end of a block that did not raise. Until then all_reduce, all_gather_single
and reduce_scatter_single of every thread are noted, and return with nothing done.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

from ringcomm._backend import backend_of

_ours: weakref.WeakSet[Any] = weakref.WeakSet()  # groups with a backend of ours


class ByThread(MutableMapping[Any, Any], threading.local):
    """A mapping of which each thread has its own."""

    def __init__(self) -> None:
        self._own: dict[Any, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        return self._own[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def watch(group: Any) -> None:
    """Have coalescings of this group be the thread's own; ringcomm/_groups.py calls it."""
    from torch.distributed import distributed_c10d as c10d

    _ours.add(group)
    state = getattr(c10d._world, "_pg_coalesce_state", None)
    if type(state) is dict:
        c10d._world._pg_coalesce_state = ByThread()
        c10d._world._pg_coalesce_state.update(state)


def wrap() -> None:
    """Wrap torch's context manager, which has no other end for a block that raises."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    coalesce: Any = c10d._coalescing_manager
    signature = inspect.signature(coalesce)

    @contextlib.contextmanager
    @functools.wraps(coalesce)
    def manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
        call = signature.bind(*args, **kwargs).arguments
        group = call.get("group") or c10d._get_default_group()
        device = call.get("device")
        if group not in _ours:
            with coalesce(*args, **kwargs) as works:
                yield works
            return
        try:
            with coalesce(*args, **kwargs) as works:
                yield works
        except BaseException:
            c10d._world.pg_coalesce_state.pop(group, None)
            if device:
                backend_of(group, device)._forget_batch()
            raise
        if device and device.type == "cpu":  # a request for each operation, as Gloo's are
            works.works = [part for work in works.works for part in _parts_of(work)]

    c10d._coalescing_manager = manager
    dist._coalescing_manager = manager


def _parts_of(work: Any) -> Any:
    return getattr(work, "parts", [work])
