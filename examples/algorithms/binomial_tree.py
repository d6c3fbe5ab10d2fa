"""Binomial tree: log2 n rounds from the root, or to it, and n - 1 messages in all.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005. For broadcast and reduce; an all_reduce is both. Ranks are counted from the root.
"""

from ringcomm.algorithms import Shape, Sum, copy, reduce, send


def binomial_tree(shape: Shape) -> None:
    shape.cut(1)
    if shape.reduces:
        copy(collect(shape, 0), shape.output(shape.root))
    else:
        copy(shape.input(shape.root), shape.output(shape.root))
    if shape.collective != "reduce":
        spread(shape, 0)


def rank_of(shape: Shape, v: int) -> int:
    return (v + shape.root) % shape.ranks


def children(shape: Shape, v: int) -> list[int]:
    """Node v with one more bit, below its lowest one: the farthest first."""
    below = [1 << k for k in reversed(range(12)) if v % (2 << k) == 0]
    return [v + bit for bit in below if v + bit < shape.ranks]


def collect(shape: Shape, v: int) -> Sum:
    rank = rank_of(shape, v)
    arrived = [send(collect(shape, child), to=rank) for child in reversed(children(shape, v))]
    return reduce(shape.input(rank), *arrived)


def spread(shape: Shape, v: int) -> None:
    held, below = shape.output(rank_of(shape, v)), children(shape, v)
    for child, got in [(c, send(held, to=rank_of(shape, c))) for c in below]:
        copy(got, shape.output(rank_of(shape, child)))
        spread(shape, child)
