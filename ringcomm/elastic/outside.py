"""The program's own operations between two steps, as of a loss that it logs.

If a rank is lost in one, the others can't know who has its result already. So an all_reduce or a
barrier there ends with a vote, as `World.attempt` does: where the vote counts, every rank has the
result, and else all that are left call it again, with the input as it was. Other operations cannot
be called again, because their results have a part for each rank, or come from one that may be gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

REPEATED = ("allreduce", "barrier")
OTHERS = ("broadcast", "reduce", "gather", "scatter", "allgather", "alltoall", "alltoall_base")


@dataclass(frozen=True)
class Between:
    """A world, as the operations between its steps need to know it."""

    is_now: Callable[[], bool]  # whether this thread's program is between two steps
    repeat: Callable[[Callable[[], Any]], Any]  # calls something until no rank is lost meanwhile
    is_failure: Callable[[BaseException], bool]  # whether an error says that the group has failed


_between: Between | None = None  # the steps of this process


def watch(between: Between) -> None:
    """Have the program call its operations so, from now on."""
    global _between
    _between = between
    for names, call in ((REPEATED, _repeated), (OTHERS, _explained)):
        for name in names:
            theirs = getattr(dist.ProcessGroup, name)
            if not hasattr(theirs, "__wrapped__"):
                setattr(dist.ProcessGroup, name, _wrapped(theirs, call))


def _wrapped(theirs: Any, call: Callable[[Between, Any, list[Any]], Any]) -> Any:
    @functools.wraps(theirs)
    def operation(group: Any, *words: Any, **more: Any) -> Any:
        between, options = _between, [*words, *more.values()][-1:]  # they come last
        is_async = getattr(options[0], "asyncOp", True) if options else True
        if between is None or is_async or group is not dist.group.WORLD or not between.is_now():
            return theirs(group, *words, **more)

        def again() -> Any:
            work = theirs(dist.group.WORLD, *words, **more)  # which a change replaces
            if work is not None:
                work.wait()
            return work

        return call(between, again, words[0] if words and isinstance(words[0], list) else [])

    return operation


def _repeated(between: Between, operation: Callable[[], Any], tensors: list[Any]) -> Any:
    """Call an operation until all that are left have its result."""
    kept = [tensor.detach().clone() for tensor in tensors]

    def again() -> Any:
        for tensor, before in zip(tensors, kept, strict=True):
            tensor.detach().copy_(before)
        return operation()

    return between.repeat(again)


def _explained(between: Between, operation: Callable[[], Any], _: list[Any]) -> Any:
    """Call an operation that is not repeated, and say how to have it repeated if it fails."""
    try:
        return operation()
    except RuntimeError as error:
        if not between.is_failure(error):
            raise
        raise dist.DistBackendError(
            f"{error}; outside of a step only all_reduce and barrier are called again: write "
            "world.attempt(function), with all of it in the function"
        ) from error
