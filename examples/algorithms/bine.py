"""Bine trees: binomial trees by negabinary numbers, whose ways are a third shorter.

De Sensi et al., "Bine Trees: Enhancing Collective Operations by Optimizing Communication
Locality", SC 2025. In step i of s = log2 n, a rank v counted from the root sends to v + d where v
is even, and to v - d where it is odd, with d = (1 - (-2)^(s - i)) / 3. For broadcast and reduce,
and a power of two of ranks: n - 1 messages.
"""

from ringcomm.algorithms import Shape, Value, copy, reduce, send


def bine(shape: Shape) -> None:
    n, root = shape.ranks, shape.root
    steps = n.bit_length() - 1
    if n != 1 << steps:
        raise ValueError(f"Bine trees are for a power of two of ranks, not {n}")
    shape.cut(1)
    edges, reached = [], [0]
    for i in range(steps):
        distance = (1 - (-2) ** (steps - i)) // 3
        edges += [(v, (v + distance if v % 2 == 0 else v - distance) % n) for v in reached]
        reached = [0, *(child for _, child in edges)]
    ranks = [((v + root) % n, (child + root) % n) for v, child in edges]
    if not shape.reduces:
        copy(shape.input(root), shape.output(root))
        for parent, child in ranks:
            copy(send(shape.output(parent), to=child), shape.output(child))
        return
    held: list[Value] = [shape.input(r) for r in range(n)]
    for parent, child in reversed(ranks):
        held[parent] = reduce(held[parent], send(held[child], to=parent))
    copy(held[root], shape.output(root))
