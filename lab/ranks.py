"""Ranks as processes, as tests use them: see ringcomm/tools/bench/ranks.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from lab.limits import SLOWER, limit
from ringcomm.tools.bench.ranks import HOST, Rank, RankError, end_with_parent
from ringcomm.tools.bench.ranks import Ranks as AnyRanks

__all__ = [
    "HOST",
    "Rank",
    "RankError",
    "Ranks",
    "end_with_parent",
    "error_of",
    "join",
    "ranks",
]


def join(rank: Rank, backend: str = "ringcomm", seconds: float = limit(60), **options: Any) -> None:
    """Make the default group."""
    dist.init_process_group(
        backend,
        store=rank.store,
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=seconds),
        **options,
    )


class Ranks(AnyRanks):
    """Ranks that make the default group before their first task, unless `backend` is None."""

    # DDP imports dynamo, in seconds; every file of tests, whose functions ranks run, pytest.
    preloaded: ClassVar = ["torch.distributed", "torch._dynamo", "pytest"]
    joins = join
    seconds = 60.0
    lifetime = limit(600)
    slower = SLOWER


@contextlib.contextmanager
def ranks(size: int, backend: str | None = "ringcomm") -> Iterator[Ranks]:
    """Ranks that end with the context."""
    some = Ranks(size, backend)
    try:
        yield some
        some.leave()
    finally:
        some.kill()


def error_of(function: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and text of what `function` raises; ("", "") when it raises nothing."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  the test says what it may be
        return type(error).__name__, str(error)
    return "", ""
