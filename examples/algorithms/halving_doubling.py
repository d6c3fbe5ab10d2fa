"""Recursive halving, then recursive doubling: 2 log2 n messages, 2 (n - 1) / n of the message.

Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004. all_reduce,
reduce_scatter and all_gather, for a power of two of ranks. Partners are n / 2, n / 4 ... 1 away.
"""

from ringcomm.algorithms import Shape, Value, copy, reduce, send


def halving_doubling(shape: Shape) -> None:
    n = shape.ranks
    if n & (n - 1):
        raise ValueError(f"recursive halving is for a power of two of ranks, not {n}")
    distances = [1 << k for k in reversed(range(n.bit_length() - 1))]
    if shape.reduces:
        held: list[dict[int, Value]] = [{c: shape.input(r, c) for c in range(n)} for r in range(n)]
        for d in distances:
            # The half of my chunks that my partner goes on with: those of its d ranks.
            theirs = [range((r ^ d) // d * d, (r ^ d) // d * d + d) for r in range(n)]
            sent = [send([held[r][c] for c in theirs[r]], to=r ^ d) for r in range(n)]
            for r in range(n):
                held[r] = {got.chunk: reduce(held[r][got.chunk], got) for got in sent[r ^ d]}
        mine = [held[r][r] for r in range(n)]
    else:
        mine = [shape.input(r, r) for r in range(n)]
    done = [[copy(mine[r], shape.output(r, r))] for r in range(n)]
    for d in reversed(distances) if shape.collective != "reduce_scatter" else []:
        sent = [send(done[r], to=r ^ d) for r in range(n)]
        for r in range(n):
            done[r] += [copy(got, shape.output(r, got.chunk)) for got in sent[r ^ d]]
