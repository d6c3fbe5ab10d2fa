"""PAT: a binomial tree for each chunk, all at once, with the longest ways first.

Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025. For
any number of ranks: log2 n messages and n - 1 chunks from each rank. So few chunks go far, and
most go to near ranks. A reduce_scatter takes the ways of an all_gather back.
"""

from ringcomm.algorithms import Shape, Value, copy, reduce, send


def pat(shape: Shape) -> None:
    add_up(shape) if shape.reduces else hand_out(shape)


def ways(n: int) -> list[tuple[int, list[int]]]:
    """The chunk of the rank i before mine goes on to i + d, for each bit d below those of i."""
    bits = [1 << k for k in range((n - 1).bit_length())]
    return [(d, [i for i in range(0, n, 2 * d) if i + d < n]) for d in bits]


def hand_out(shape: Shape) -> None:
    n = shape.ranks
    for r in range(n):
        copy(shape.input(r, r), shape.output(r, r))
    for d, moving in reversed(ways(n)):
        held = [[shape.output(r, (r - i) % n) for i in moving] for r in range(n)]
        sent = [send(held[r], to=(r + d) % n) for r in range(n)]
        for got in [got for message in sent for got in message]:
            copy(got, shape.output(got.rank, got.chunk))


def add_up(shape: Shape) -> None:
    n = shape.ranks
    held: list[dict[int, Value]] = [{c: shape.input(r, c) for c in range(n)} for r in range(n)]
    for d, moving in ways(n):
        chunks = [[held[r][(r - i - d) % n] for i in moving] for r in range(n)]
        sent = [send(chunks[r], to=(r - d) % n) for r in range(n)]
        for got in [got for message in sent for got in message]:
            held[got.rank][got.chunk] = reduce(held[got.rank][got.chunk], got)
    for r in range(n):
        copy(held[r][r], shape.output(r, r))
