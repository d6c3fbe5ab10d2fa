"""The collectives that are measured: how each is called, what it must give, and how it is rated.

Sizes are nccl-tests': the bytes of the larger of a rank's two buffers, so the whole output of an
all_gather and the whole input of a reduce_scatter. `algbw` is that size divided by the time.
`busbw` multiplies it by FACTORS, so that a figure can be compared with the speed of the memory or
the link whatever the number of ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

ELEMENT = 4  # bytes of a float32
ROOT = 0

# torch 2.13 gave them these names, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _twice_the_others(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _the_others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one(ranks: int) -> float:
    return 1.0


# busbw / algbw by the number of ranks, as nccl-tests has them (its doc/PERFORMANCE.md says why).
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": _twice_the_others,
    "all_gather": _the_others,
    "reduce_scatter": _the_others,
    "all_to_all": _the_others,
    "broadcast": _one,
    "reduce": _one,
    "gather": _the_others,
    "scatter": _the_others,
    "send_recv": _one,
    "barrier": _one,
}
# How often a rank copies the bytes of that size on the way, in the plans for ranks of one host: the
# one that copies the most; a sum counts as the copy of its result. A buffer that all ranks read or
# write in place is in here once on each.
COPIES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: (2 * n - 1) / n,  # all but its own part out, that summed, the rest in
    "all_gather": lambda n: (n + 1) / n,  # its part out, its part in place, the others' in
    "reduce_scatter": _one,  # all but its own part out, that summed
    "all_to_all": lambda n: (2 * n - 1) / n,  # all but one part out, all in
    "broadcast": _one,  # out, or in
    "reduce": _one,
    "gather": _one,
    "scatter": _one,
    "send_recv": lambda n: 2.0,  # out, and in
    "barrier": lambda n: 0.0,
}
# Each rank has one part of the larger buffer, so its length must be a multiple of the ranks.
IN_PARTS = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}


class WrongResultError(AssertionError):
    """A collective gave something else than it must."""


@dataclass(frozen=True)
class Case:
    """One collective with its buffers on one rank. `expected` None: this rank gets no result."""

    call: Callable[[], Any]
    given: torch.Tensor
    result: torch.Tensor
    expected: torch.Tensor | None


def elements(collective: str, size: int, ranks: int) -> int:
    """Return how many float32 the larger buffer holds: what fits in `size` bytes, at least one.

    Collectives in parts get a multiple of `ranks`, at least one a rank. A barrier has none.
    """
    if collective == "barrier":
        return 0
    step = ranks if collective in IN_PARTS else 1
    return max(1, size // ELEMENT // step) * step


def bandwidths(collective: str, size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return (algbw, busbw) in GB/s, 10⁹ bytes a second."""
    algbw = size / seconds / 1e9
    return algbw, algbw * FACTORS[collective](ranks)


def values(rank: int, count: int) -> torch.Tensor:
    """What rank `rank` contributes: integers from 0 to 16, which float32 adds exactly.

    Neighbours differ, ranks differ, and the period of 17 fits no buffer's length, so a part that
    lands in the wrong place shows.
    """
    numbers = torch.arange(count, dtype=torch.int32)
    return numbers.remainder_(17).mul_(7).add_(13 * rank).remainder_(17).to(torch.float32)


def check(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise WrongResultError unless every element is exactly right."""
    if got.shape != expected.shape:
        raise WrongResultError(
            f"{what}: {list(got.shape)} elements instead of {list(expected.shape)}"
        )
    wrong = (got != expected).nonzero().flatten()
    if len(wrong):
        at = int(wrong[0])
        raise WrongResultError(
            f"{what}: {len(wrong)} of {len(got)} elements are wrong, the first is [{at}]: "
            f"{got[at].item()} instead of {expected[at].item()}"
        )


def make(collective: str, count: int, rank: int, ranks: int) -> Case:
    """Return a collective ready to be called on the default group; `count` from `elements`."""
    return _MAKERS[collective](count, rank, ranks)


def verify(collective: str, count: int, rank: int, ranks: int) -> None:
    """Call it once on data of its own, and check what comes out. Raises WrongResultError."""
    case = make(collective, count, rank, ranks)
    case.call()
    if case.expected is not None:
        check(f"{collective} of {count * ELEMENT} bytes", case.result, case.expected)


def _total(count: int, ranks: int) -> torch.Tensor:
    return functools.reduce(torch.Tensor.add_, (values(rank, count) for rank in range(ranks)))


def _all_reduce(count: int, rank: int, ranks: int) -> Case:
    data = values(rank, count)
    return Case(lambda: dist.all_reduce(data), data, data, _total(count, ranks))


def _all_gather(count: int, rank: int, ranks: int) -> Case:
    part, whole = values(rank, count // ranks), torch.full((count,), -1.0)
    expected = torch.cat([values(other, count // ranks) for other in range(ranks)])
    return Case(lambda: all_gather_single(whole, part), part, whole, expected)


def _reduce_scatter(count: int, rank: int, ranks: int) -> Case:
    whole, part = values(rank, count), torch.full((count // ranks,), -1.0)
    expected = _total(count, ranks).chunk(ranks)[rank]
    return Case(lambda: reduce_scatter_single(part, whole), whole, part, expected)


def _all_to_all(count: int, rank: int, ranks: int) -> Case:
    data, result = values(rank, count), torch.full((count,), -1.0)
    expected = torch.cat([values(other, count).chunk(ranks)[rank] for other in range(ranks)])
    return Case(lambda: dist.all_to_all_single(result, data), data, result, expected)


def _broadcast(count: int, rank: int, ranks: int) -> Case:
    data = values(rank, count)
    return Case(lambda: dist.broadcast(data, ROOT), data, data, values(ROOT, count))


def _reduce(count: int, rank: int, ranks: int) -> Case:
    data = values(rank, count)
    expected = _total(count, ranks) if rank == ROOT else None
    return Case(lambda: dist.reduce(data, ROOT), data, data, expected)


def _gather(count: int, rank: int, ranks: int) -> Case:
    part, whole = values(rank, count // ranks), torch.full((count,), -1.0)
    if rank != ROOT:
        return Case(lambda: dist.gather(part, None, ROOT), part, whole, None)
    parts = list(whole.chunk(ranks))
    expected = torch.cat([values(other, count // ranks) for other in range(ranks)])
    return Case(lambda: dist.gather(part, parts, ROOT), part, whole, expected)


def _scatter(count: int, rank: int, ranks: int) -> Case:
    whole, part = values(ROOT, count), torch.full((count // ranks,), -1.0)
    parts = list(whole.chunk(ranks)) if rank == ROOT else None
    expected = values(ROOT, count).chunk(ranks)[rank]
    return Case(lambda: dist.scatter(part, parts, ROOT), whole, part, expected)


def _send_recv(count: int, rank: int, ranks: int) -> Case:
    """Everyone sends to the next rank and receives from the one before, as nccl-tests does."""
    data, result = values(rank, count), torch.full((count,), -1.0)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def exchange() -> None:
        sending = dist.isend(data, after)
        dist.recv(result, before)
        assert sending is not None
        sending.wait()

    return Case(exchange, data, result, values(before, count))


def _barrier(count: int, rank: int, ranks: int) -> Case:
    return Case(dist.barrier, torch.empty(0), torch.empty(0), None)


_MAKERS: dict[str, Callable[[int, int, int], Case]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send_recv": _send_recv,
    "barrier": _barrier,
}
