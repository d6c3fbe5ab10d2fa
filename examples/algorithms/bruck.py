"""Bruck: log2 n rounds for any number of ranks, each with ranks twice as far away.

Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient Algorithms for All-to-All Communications in
Multiport Message-Passing Systems", 1997. An all_gather sends n - 1 chunks from each rank; an
all_to_all about n / 2 log2 n, as each chunk takes a way for each bit of its distance.
"""

from ringcomm.algorithms import Chunk, Shape, copy, send


def all_gather(shape: Shape) -> None:
    n, distance = shape.ranks, 1
    held = [[copy(shape.input(r, r), shape.output(r, r))] for r in range(n)]
    while distance < n:
        count = min(distance, n - distance)
        sent = [send(held[r][:count], to=(r - distance) % n) for r in range(n)]
        for r in range(n):
            arrived = sent[(r + distance) % n]
            held[r] += [copy(got, shape.output(r, got.chunk)) for got in arrived]
        distance *= 2


def all_to_all(shape: Shape) -> None:
    n, distance = shape.ranks, 1
    # By how far away their goal is, in ranks.
    held: list[list[Chunk]] = [[shape.input(r, (r + i) % n) for i in range(n)] for r in range(n)]
    while distance < n:
        moving = [i for i in range(n) if i & distance]
        sent = [send([held[r][i] for i in moving], to=(r + distance) % n) for r in range(n)]
        for r in range(n):
            for i, got in zip(moving, sent[(r - distance) % n], strict=True):
                held[r][i] = got
        distance *= 2
    for r in range(n):
        for i in range(n):
            copy(held[r][i], shape.output(r, (r - i) % n))
