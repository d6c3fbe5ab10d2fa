"""Four algorithms that are wrong, for docs/by_hand.md: `ringcomm verify` tells how."""

from ringcomm.algorithms import Shape, copy, send


def hasty(shape: Shape) -> None:
    """A broadcast along a chain whose slots are used again before they were read."""
    shape.cut(4)
    for part in range(4):
        held = copy(shape.input(0, part), shape.output(0, part))
        for rank in range(1, shape.ranks):
            got = send(held, to=rank, credit=False)
            held = copy(got, shape.output(rank, part))


def forgetful(shape: Shape) -> None:
    """An all_gather along a ring with a step too few."""
    n = shape.ranks
    held = [copy(shape.input(r, r), shape.output(r, r)) for r in range(n)]
    for step in range(1, n - 1):
        held = [send(held[r - 1], to=r) for r in range(n)]
        held = [copy(held[r], shape.output(r, (r - step) % n)) for r in range(n)]


def stuck(shape: Shape) -> None:
    """A barrier in which every rank waits before it signals."""
    for rank in range(shape.ranks):
        shape.wait(rank, from_=(rank - 1) % shape.ranks)
        shape.signal(rank, to=(rank + 1) % shape.ranks)


def endless(shape: Shape) -> None:
    """A token that goes round and never comes to rest."""
    rank = 0
    while True:
        shape.signal(rank, to=(rank + 1) % shape.ranks)
        rank = (rank + 1) % shape.ranks
