"""An all_gather of 4 ranks on uplink, found by search.

    ringcomm plan search all_gather --topology examples/topologies/uplink.json --size 1M
       --chunks 1 --tries 16 --seed 0

By simulation 1M bytes take 135 ms, by the library's ring 331 ms, and at least 110 ms by any
plan. Register it for this group, on this network: docs/search.md.
"""

from ringcomm.algorithms import Chunk, Shape, copy, send

RANKS = 4
PARTS = 1  # chunks in each rank's part of the message
# send:  send the chunk
# take:  copy the chunk that was sent into the output
# Each step: the verb, the chunk, from which rank, to which rank.
STEPS = (
    ("send", 1, 1, 0),
    ("send", 0, 0, 1),
    ("send", 2, 2, 3),
    ("send", 3, 3, 0),
    ("send", 1, 1, 3),
    ("send", 2, 2, 1),
    ("send", 0, 0, 2),
    ("take", 1, 1, 0),
    ("take", 0, 0, 1),
    ("take", 2, 2, 3),
    ("send", 0, 1, 3),
    ("send", 2, 2, 0),
    ("send", 1, 0, 2),
    ("take", 1, 1, 3),
    ("take", 2, 2, 1),
    ("take", 0, 0, 2),
    ("take", 0, 1, 3),
    ("take", 2, 2, 0),
    ("take", 1, 0, 2),
    ("take", 3, 3, 0),
    ("send", 3, 0, 1),
    ("send", 3, 0, 2),
    ("take", 3, 0, 1),
    ("take", 3, 0, 2),
)


def all_gather(shape: Shape) -> None:
    if (shape.collective, shape.ranks, shape.root) != ("all_gather", 4, 0):
        raise ValueError("this plan is for an all_gather of 4 ranks")
    shape.cut(PARTS)
    for rank in range(RANKS):
        for chunk in range(rank * PARTS, (rank + 1) * PARTS):
            copy(shape.input(rank, chunk), shape.output(rank, chunk))
    sent: dict[tuple[int, int], Chunk] = {}
    for verb, chunk, source, target in STEPS:
        if verb == "send":
            sent[chunk, target] = send(shape.output(source, chunk), to=target)
        elif verb == "take":
            copy(sent[chunk, target], shape.output(target, chunk))
