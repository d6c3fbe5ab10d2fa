"""A torus of rows and columns: rings along the rows, then along the columns, and back.

Ying, Kumar, Chen, Wang and Cheng, "Image Classification at Supercomputer Scale", 2018. all_reduce:
each rank sends 2 (n - 1) / n of the message, in 2 (rows - 1) + 2 (columns - 1) messages.
"""

from ringcomm.algorithms import Chunk, Shape, Value, copy, reduce, send


def torus_2d(shape: Shape) -> None:
    n = shape.ranks
    columns = next(c for c in range(1, n + 1) if n % c == 0 and c * c >= n)
    # Rank and chunk i are in row i // columns. A row's rank of column j adds up the chunks there.
    in_column = [list(range(j, n, columns)) for j in range(columns)]
    rows = [list(range(i, i + columns)) for i in range(0, n, columns)]
    held: list[dict[int, Value]] = [{c: shape.input(r, c) for c in range(n)} for r in range(n)]
    for row in rows:
        add_up(held, row, in_column)
    for ranks in in_column:
        add_up(held, ranks, [[r] for r in ranks])
    done = [{r: copy(held[r][r], shape.output(r, r))} for r in range(n)]
    for ranks in in_column:
        hand_round(shape, done, ranks, [[r] for r in ranks])
    for row in rows:
        hand_round(shape, done, row, in_column)


def add_up(held: list[dict[int, Value]], ring: list[int], chunks: list[list[int]]) -> None:
    """The i-th rank of the ring ends with the sum of chunks[i]."""
    for step in range(1, len(ring)):
        groups = [chunks[(i - step) % len(ring)] for i in range(len(ring))]
        sent = [
            send([held[r][c] for c in groups[i]], ring[i + 1 - len(ring)])
            for i, r in enumerate(ring)
        ]
        for r, arrived in zip(ring, [sent[-1], *sent[:-1]], strict=True):
            held[r] |= {got.chunk: reduce(got, held[r][got.chunk]) for got in arrived}


def hand_round(
    shape: Shape, done: list[dict[int, Chunk]], ring: list[int], chunks: list[list[int]]
) -> None:
    for step in range(len(ring) - 1):
        groups = [chunks[(i - step) % len(ring)] for i in range(len(ring))]
        sent = [
            send([done[r][c] for c in groups[i]], ring[i + 1 - len(ring)])
            for i, r in enumerate(ring)
        ]
        for r, arrived in zip(ring, [sent[-1], *sent[:-1]], strict=True):
            done[r] |= {got.chunk: copy(got, shape.output(r, got.chunk)) for got in arrived}
