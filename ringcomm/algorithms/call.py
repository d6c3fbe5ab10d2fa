"""A collective call, as the planners and the verifier take it."""

from __future__ import annotations

from typing import NamedTuple

from ringcomm import _planner

COLLECTIVES, ROOTED, SHARDED = _planner.COLLECTIVES, _planner.ROOTED, _planner.SHARDED
WHOLE = ("all_reduce", "broadcast", "reduce")  # the message has no part for each rank
ADDING = ("all_reduce", "reduce_scatter", "reduce")
MOST_RANKS = _planner.LIMITS["most_ranks"]


class Call(NamedTuple):
    """A call that all ranks of a group make, in the order in which the library takes it.

    Lengths are bytes: `bytes` of a message without parts, else `shards`, or what each rank sends
    to each in an all_to_all, and gets from each: `send` and `recv`.
    """

    collective: int
    ranks: int
    local: int  # ranks on each host; all on one host read one another's memory
    element: int
    root: int
    bytes: int
    shards: list[int]
    send: list[int]
    recv: list[int]

    @property
    def name(self) -> str:
        return COLLECTIVES[self.collective]

    @property
    def hosts(self) -> int:
        return self.ranks // self.local

    @property
    def whole(self) -> int:
        """The bytes of the message, all shards together."""
        return self.bytes or sum(self.shards or self.send)

    @property
    def compared(self) -> int:
        """The bytes that the limits of the selection table are for: the message, or a shard."""
        return max(self.shards) if self.name in SHARDED else self.bytes

    @property
    def adds(self) -> bool:
        return self.name in ADDING


def call_of(
    collective: str, ranks: int, size: int, hosts: int = 1, element: int = 4, root: int = 0
) -> Call:
    """Describe a message of `size` bytes, all shards together, among `ranks` on `hosts`.

    Elements have `element` bytes, and shards are as equal as they allow. In all_to_all `size` is
    what each rank sends. Raises ValueError where no group or message is like this.
    """
    if collective not in COLLECTIVES:
        raise ValueError(
            f"there is no collective {collective!r}: use one of {', '.join(COLLECTIVES)}"
        )
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"a group of {ranks} ranks: ringcomm takes 1 to {MOST_RANKS}")
    if hosts < 1 or ranks % hosts:
        raise ValueError(f"{ranks} ranks cannot be spread evenly over {hosts} hosts")
    if not 0 <= root < ranks:
        raise ValueError(f"rank {root} is not in a group of {ranks}, so it cannot be the root")
    if element not in (1, 2, 4, 8, 16) or size % element or size < 0:
        raise ValueError(f"{size} bytes are no whole number of elements of {element} bytes")
    share, more = divmod(size // element, ranks)
    shards = [(share + (rank < more)) * element for rank in range(ranks)]
    parts = shards if collective == "all_to_all" else []
    return Call(
        COLLECTIVES.index(collective),
        ranks,
        ranks // hosts,
        element,
        root if collective in ROOTED else 0,
        size if collective in WHOLE else 0,
        shards if collective in SHARDED else [],
        parts,
        parts,
    )
