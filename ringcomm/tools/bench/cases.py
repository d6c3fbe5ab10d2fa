"""The collectives that are measured: how each is called, and what it must give.

Sizes are nccl-tests': the bytes of the larger of a rank's two buffers, so the whole output of an
all_gather and the whole input of a reduce_scatter. traits.py has how each is rated.

A collective is measured in place, out of place, or both, as far as torch.distributed has such
calls: all_reduce, broadcast and reduce have one buffer. In place, what a rank gives to an
all_gather lies where it belongs in the whole, and the result of a reduce_scatter in its input.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ringcomm.tools.bench.traits import EXACT, IN_PARTS, OPS

if TYPE_CHECKING:
    from collections.abc import Callable

ELEMENT = 4  # bytes of a float32
ROOT = 0
FILLER = 99  # in buffers that a collective has to fill

# torch 2.13 gave them these names, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WrongResultError(AssertionError):
    """A collective gave something else than it must."""


@dataclass(frozen=True)
class Form:
    """In which form a collective is called. `in_place` says nothing where there is one form."""

    type: str = "float32"
    op: str = "sum"
    in_place: bool = False
    device: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.type)
        return dtype

    @property
    def reduce(self) -> Any:
        return getattr(dist.ReduceOp, OPS[self.op][0])

    def filled(self, count: int) -> torch.Tensor:
        """Return a buffer that a collective has to fill."""
        return torch.full((count,), FILLER, dtype=self.dtype, device=self.device)


PLAIN = Form()


@dataclass(frozen=True)
class Case:
    """One collective with its buffers on one rank. `expected` None: this rank gets no result."""

    call: Callable[[], Any]
    given: torch.Tensor
    result: torch.Tensor
    expected: torch.Tensor | None

    def wrong(self) -> int:
        """Call it, and return how many elements of this rank's result are wrong."""
        self.call()
        if self.expected is None:
            return 0
        return int((self.result.cpu() != self.expected).sum())


def elements(collective: str, size: int, ranks: int, element: int = ELEMENT) -> int:
    """Return how many elements of `element` bytes the larger buffer holds.

    It is as many as fit in `size` bytes, and at least one. Collectives in parts get a multiple of
    `ranks`, at least one a rank. A barrier has none.
    """
    if collective == "barrier":
        return 0
    step = ranks if collective in IN_PARTS else 1
    return max(1, size // element // step) * step


def values(rank: int, count: int, form: Form = PLAIN, ranks: int = 1) -> torch.Tensor:
    """Return what rank `rank` of `ranks` contributes: integers from 0 to 16, exact in float32.

    Neighbours differ, ranks differ, and the period of 17 fits no buffer's length, so a part that
    lands in the wrong place shows. Types that are less exact get smaller numbers when the ranks are
    many, and products those of 1 and 2.
    """
    numbers = torch.arange(count, dtype=torch.int32)
    numbers = numbers.remainder_(17).mul_(7).add_(13 * rank).remainder_(17)
    if form.op == "prod":
        numbers = numbers.remainder_(2).add_(1)
    elif EXACT[form.type] < 16 * ranks:
        numbers = numbers.remainder_(EXACT[form.type] // ranks + 1)
    return numbers.to(form.dtype)


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


def make(collective: str, count: int, rank: int, ranks: int, form: Form = PLAIN) -> Case:
    """Return a collective ready to be called on the default group; `count` from `elements`."""
    return _MAKERS[collective](_Place(count, rank, ranks, form))


def verify(collective: str, count: int, rank: int, ranks: int, form: Form = PLAIN) -> None:
    """Call it once on data of its own, and check what comes out. Raises WrongResultError."""
    case = make(collective, count, rank, ranks, form)
    case.call()
    if case.expected is not None:
        check(f"{collective} of {count * form.dtype.itemsize} bytes", case.result, case.expected)


@dataclass(frozen=True)
class _Place:
    """Where a case is made: the elements of the larger buffer, the rank, and the form."""

    count: int
    rank: int
    ranks: int
    form: Form

    @property
    def part(self) -> int:
        """How many elements one rank's part has."""
        return self.count // self.ranks

    def values(self, rank: int, count: int) -> torch.Tensor:
        return values(rank, count, self.form, self.ranks)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.form.device)

    def total(self) -> torch.Tensor:
        combine = getattr(torch, OPS[self.form.op][1])
        every = (self.values(rank, self.count) for rank in range(self.ranks))
        return functools.reduce(combine, every)

    def parts(self) -> torch.Tensor:
        """Return every rank's part, one after the other."""
        return torch.cat([self.values(rank, self.part) for rank in range(self.ranks)])


def _all_reduce(at: _Place) -> Case:
    data = at.put(at.values(at.rank, at.count))
    return Case(lambda: dist.all_reduce(data, at.form.reduce), data, data, at.total())


def _all_gather(at: _Place) -> Case:
    whole, given = at.form.filled(at.count), at.values(at.rank, at.part)
    part = whole.chunk(at.ranks)[at.rank].copy_(given) if at.form.in_place else at.put(given)
    return Case(lambda: all_gather_single(whole, part), part, whole, at.parts())


def _reduce_scatter(at: _Place) -> Case:
    whole, expected = at.put(at.values(at.rank, at.count)), at.total().chunk(at.ranks)[at.rank]
    part = whole.chunk(at.ranks)[at.rank] if at.form.in_place else at.form.filled(at.part)
    return Case(lambda: reduce_scatter_single(part, whole, at.form.reduce), whole, part, expected)


def _all_to_all(at: _Place) -> Case:
    data, result = at.put(at.values(at.rank, at.count)), at.form.filled(at.count)
    every = (at.values(rank, at.count).chunk(at.ranks) for rank in range(at.ranks))
    expected = torch.cat([parts[at.rank] for parts in every])
    return Case(lambda: dist.all_to_all_single(result, data), data, result, expected)


def _broadcast(at: _Place) -> Case:
    data = at.put(at.values(at.rank, at.count))
    return Case(lambda: dist.broadcast(data, ROOT), data, data, at.values(ROOT, at.count))


def _reduce(at: _Place) -> Case:
    data = at.put(at.values(at.rank, at.count))
    expected = at.total() if at.rank == ROOT else None
    return Case(lambda: dist.reduce(data, ROOT, at.form.reduce), data, data, expected)


def _gather(at: _Place) -> Case:
    part, whole = at.put(at.values(at.rank, at.part)), at.form.filled(at.count)
    if at.rank != ROOT:
        return Case(lambda: dist.gather(part, None, ROOT), part, whole, None)
    parts = list(whole.chunk(at.ranks))
    return Case(lambda: dist.gather(part, parts, ROOT), part, whole, at.parts())


def _scatter(at: _Place) -> Case:
    given = at.values(ROOT, at.count)
    whole, part = at.put(given), at.form.filled(at.part)
    parts = list(whole.chunk(at.ranks)) if at.rank == ROOT else None
    expected = given.chunk(at.ranks)[at.rank]
    return Case(lambda: dist.scatter(part, parts, ROOT), whole, part, expected)


def _send_recv(at: _Place) -> Case:
    """Everyone sends to the next rank and receives from the one before, as nccl-tests does."""
    data, result = at.put(at.values(at.rank, at.count)), at.form.filled(at.count)
    after, before = (at.rank + 1) % at.ranks, (at.rank - 1) % at.ranks

    def exchange() -> None:
        if at.form.device == "cpu":
            sending = dist.isend(data, after)
            dist.recv(result, before)
            assert sending is not None
            sending.wait()
            return
        # On a stream each would wait for the other's kernel: both are one operation.
        operations = [dist.P2POp(dist.isend, data, after), dist.P2POp(dist.irecv, result, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return Case(exchange, data, result, at.values(before, at.count))


def _barrier(at: _Place) -> Case:
    return Case(dist.barrier, torch.empty(0), torch.empty(0), None)


_MAKERS: dict[str, Callable[[_Place], Case]] = {
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
