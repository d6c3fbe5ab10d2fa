"""Ring: each rank sends to the next one, 2 (n - 1) / n of the message in all.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
For all_reduce, reduce_scatter and all_gather. `pipelined` has two parts of each chunk under way.
"""

from collections.abc import Iterator

from ringcomm.algorithms import Shape, Value, copy, reduce, send


def ring(shape: Shape) -> None:
    for _ in steps(shape, parts=1, part=0):
        pass


def steps(shape: Shape, parts: int, part: int) -> Iterator[None]:
    """Yield after each step of this part of every chunk."""
    n = shape.ranks

    def of(rank: int) -> int:
        return rank % n * parts + part

    held: list[Value] = [shape.input(r, of(r - 1 if shape.reduces else r)) for r in range(n)]
    for step in range(1, n if shape.reduces else 1):
        arrived = [send(held[r - 1], to=r) for r in range(n)]
        held = [reduce(arrived[r], shape.input(r, of(r - 1 - step))) for r in range(n)]
        yield
    held = [copy(held[r], shape.output(r, of(r))) for r in range(n)]
    for step in range(1, 1 if shape.collective == "reduce_scatter" else n):
        arrived = [send(held[r - 1], to=r) for r in range(n)]
        held = [copy(arrived[r], shape.output(r, of(r - step))) for r in range(n)]
        yield


def pipelined(shape: Shape) -> None:
    """While one part is added up, the other is under way."""
    shape.cut(2 if shape.sharded else 2 * shape.ranks)
    for _ in zip(steps(shape, 2, 0), steps(shape, 2, 1), strict=True):
        pass
