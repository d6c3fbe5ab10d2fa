"""Two binary trees, each for half of the message: a rank is a leaf of one at least.

Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009. For all_reduce, broadcast and reduce, root 0 alone. A rank sends about 2 messages a segment,
so an all_reduce takes the time of 2 messages and about 4 log2 n hops.
"""

from ringcomm.algorithms import Shape, Sum, copy, reduce, send


def double_binary_trees(shape: Shape) -> None:
    n = shape.ranks
    if shape.root != 0:
        raise ValueError("these trees grow from rank 0")
    shape.cut(2)
    # The second tree is the first one, with all ranks but the root turned by one.
    trees = [list(range(n)), [0, *range(2, n), 1][:n]]
    for half, ranks in enumerate(trees):
        if shape.reduces:
            copy(collect(shape, half, ranks, 0), shape.output(0, half))
        else:
            copy(shape.input(0, half), shape.output(0, half))
    for half, ranks in enumerate(trees):
        if shape.collective != "reduce":
            spread(shape, half, ranks, 0)


def children(n: int, v: int) -> list[int]:
    """In order: node 0 is above all; v has the middles of both sides of its lowest bit."""
    lowest = v & -v if v else 2 << (n - 1).bit_length()
    left = v - lowest // 2 if v else 0
    right = next((v + (b >> 1) for b in [lowest >> k for k in range(13)] if v + (b >> 1) < n), v)
    return [child for child in (left, right) if child != v and 0 < child < n]


def collect(shape: Shape, half: int, ranks: list[int], v: int) -> Sum:
    below = [send(collect(shape, half, ranks, c), to=ranks[v]) for c in children(shape.ranks, v)]
    return reduce(shape.input(ranks[v], half), *below)


def spread(shape: Shape, half: int, ranks: list[int], v: int) -> None:
    below, mine = children(shape.ranks, v), shape.output(ranks[v], half)
    for child, got in [(c, send(mine, to=ranks[c])) for c in below]:
        copy(got, shape.output(ranks[child], half))
        spread(shape, half, ranks, child)
