"""PAT: a binomial tree for each chunk, all at once, with the longest ways first.

Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025. For
any number of ranks: log2 n messages and n - 1 chunks from each rank. So few chunks go far, and
most go to near ranks. A reduce_scatter takes the ways of an all_gather back.
"""

from ringcomm.plan import Shape, Value, copy, reduce, send


def pat(shape: Shape) -> None:
    n = shape.ranks
    bits = [1 << k for k in range((n - 1).bit_length())]
    # The chunk of the rank i before mine goes on to i + d, for each bit d below those of i.
    ways = {d: [i for i in range(0, n, 2 * d) if i + d < n] for d in bits}
    if shape.reduces:
        held: list[dict[int, Value]] = [{c: shape.input(r, c) for c in range(n)} for r in range(n)]
        for d in bits:
            for r, sent in [
                (r, send([held[r][(r - i - d) % n] for i in ways[d]], to=(r - d) % n))
                for r in range(n)
            ]:
                to = held[(r - d) % n]
                to |= {got.chunk: reduce(to[got.chunk], got) for got in sent}
        for r in range(n):
            copy(held[r][r], shape.output(r, r))
        return
    for r in range(n):
        copy(shape.input(r, r), shape.output(r, r))
    for d in reversed(bits):
        sent = [[shape.output(r, (r - i) % n) for i in ways[d]] for r in range(n)]
        for to, arrived in [((r + d) % n, send(sent[r], to=(r + d) % n)) for r in range(n)]:
            for got in arrived:
                copy(got, shape.output(to, got.chunk))
