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

from ringcomm._runtime.backend import backend_of

_ours: weakref.WeakSet[Any] = weakref.WeakSet()  # groups with a backend of ours


class ByThread(MutableMapping[Any, Any]):
    """In the place of torch's mapping while a block is under way: ours are each thread's own.

    Not at other times: torch looks into its mapping at each all_reduce, and into a dict fast.
    """

    _blocks = 0  # under way, in all threads
    _mutex = threading.Lock()

    def __init__(self, others: MutableMapping[Any, Any]) -> None:
        self.others = others  # for groups that are not ours
        self._here = threading.local()

    @classmethod
    @contextlib.contextmanager
    def takes_part(cls) -> Iterator[None]:
        from torch.distributed import distributed_c10d as c10d

        world: Any = c10d._world
        with cls._mutex:
            if cls._blocks == 0:
                world._pg_coalesce_state = cls(world.pg_coalesce_state)
            cls._blocks += 1
        try:
            yield
        finally:
            with cls._mutex:
                cls._blocks -= 1
                if cls._blocks == 0:
                    world._pg_coalesce_state = world.pg_coalesce_state.others

    def _of(self, group: Any) -> MutableMapping[Any, Any]:
        return self._own() if group in _ours else self.others

    def _own(self) -> dict[Any, Any]:
        own: dict[Any, Any] = self._here.__dict__
        return own.setdefault("groups", {})

    def __getitem__(self, group: Any) -> Any:
        return self._of(group)[group]

    def __setitem__(self, group: Any, operations: Any) -> None:
        self._of(group)[group] = operations

    def __delitem__(self, group: Any) -> None:
        del self._of(group)[group]

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._own(), *self.others])

    def __len__(self) -> int:
        return len(self._own()) + len(self.others)


def watch(group: Any) -> None:
    """Have coalescings of this group be the thread's own; ringcomm/_runtime/groups.py calls it."""
    _ours.add(group)


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
        with ByThread.takes_part():
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
