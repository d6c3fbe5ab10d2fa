"""Swing: recursive halving with partners 1, -1, 3, -5, 11 ... away, so ways are short on a torus.

De Sensi, Bonato, Saam and Hoefler, "Swing: Short-cutting Rings for Higher Bandwidth Allreduce",
NSDI 2024. In step s an even rank r talks to r + rho(s), an odd one to r - rho(s), where
rho(s) = (1 - (-2)^(s + 1)) / 3. all_reduce, for a power of two of ranks: each sends 2 (n - 1) / n
of the message, in 2 log2 n messages.
"""

from ringcomm.algorithms import Shape, Value, copy, reduce, send


def swing(shape: Shape) -> None:
    n = shape.ranks
    rounds = n.bit_length() - 1
    if n != 1 << rounds:
        raise ValueError(f"swing is for a power of two of ranks, not {n}")

    def partner(rank: int, step: int) -> int:
        rho = (1 - (-2) ** (step + 1)) // 3
        return (rank + rho if rank % 2 == 0 else rank - rho) % n

    def reached(rank: int, step: int) -> list[int]:
        """The ranks that `rank` reaches from this step on: it adds up their chunks."""
        if step == rounds:
            return [rank]
        return reached(rank, step + 1) + reached(partner(rank, step), step + 1)

    held: list[dict[int, Value]] = [{c: shape.input(r, c) for c in range(n)} for r in range(n)]
    for step in range(rounds):
        theirs = [reached(partner(r, step), step + 1) for r in range(n)]
        sent = [send([held[r][c] for c in theirs[r]], to=partner(r, step)) for r in range(n)]
        for r in range(n):
            arrived = sent[partner(r, step)]
            held[r] = {got.chunk: reduce(held[r][got.chunk], got) for got in arrived}
    done = [[copy(held[r][r], shape.output(r, r))] for r in range(n)]
    for step in reversed(range(rounds)):
        sent = [send(done[r], to=partner(r, step)) for r in range(n)]
        for r in range(n):
            done[r] += [copy(got, shape.output(r, got.chunk)) for got in sent[partner(r, step)]]
