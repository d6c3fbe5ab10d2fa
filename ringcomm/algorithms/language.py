"""The words in which you write an algorithm: shapes, chunks, `send`, `reduce` and `copy`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import overload

from ringcomm.algorithms.call import ADDING, WHOLE, Call
from ringcomm.algorithms.program import (
    INPUT,
    OUTPUT,
    SLOT,
    Message,
    Operand,
    Piece,
    Recorder,
    Term,
    caller,
    stop,
)

__all__ = [
    "Algorithm",
    "Chunk",
    "Shape",
    "Sum",
    "Value",
    "copy",
    "reduce",
    "send",
]


class Chunk:
    """A chunk in memory of one rank: in its input or output, or in a message that it has got.

    `rank` is the rank that can read it, and `chunk` its number in the message.
    """

    __slots__ = ("_message", "_operand", "_ranks", "_shape", "chunk", "rank")

    def __init__(
        self, shape: Shape, rank: int, chunk: int, operand: Operand, ranks: int = 0,
        message: Message | None = None,
    ) -> None:  # fmt: skip
        self._shape = shape
        self.rank = rank
        self.chunk = chunk
        self._operand = operand
        self._ranks = ranks
        self._message = message

    def _terms(self) -> tuple[Term, ...]:
        if self._operand.space != OUTPUT:
            return (Term(self._operand, self._ranks, self._message),)
        held = self._shape._recorder.held.get((self.rank, self.chunk))
        if held is None:
            stop(f"reads {self}, which no line has written")
        return (Term(self._operand, held[0], None),)

    def _piece(self) -> Piece:
        return Piece(self._terms(), self.chunk, False)

    def __repr__(self) -> str:
        where = {INPUT: "input", OUTPUT: "output", SLOT: "message"}[self._operand.space]
        return f"chunk {self.chunk} of rank {self.rank}'s {where}"


class Sum:
    """Chunks of one rank that are to be added up, in this order, where they are sent or copied."""

    __slots__ = ("_parts", "_shape", "chunk", "rank")

    def __init__(self, shape: Shape, rank: int, chunk: int, parts: tuple[Chunk, ...]) -> None:
        self._shape = shape
        self.rank = rank
        self.chunk = chunk
        self._parts = parts

    def _terms(self) -> tuple[Term, ...]:
        return tuple([term for part in self._parts for term in part._terms()])

    def _piece(self) -> Piece:
        terms = self._terms()
        seen = 0
        for term in terms:
            twice = seen & term.ranks
            if twice:
                rank = (twice & -twice).bit_length() - 1
                stop(f"adds what rank {rank} has given to chunk {self.chunk} twice")
            seen |= term.ranks
        return Piece(terms, self.chunk, True)

    def __repr__(self) -> str:
        return f"a sum of {len(self._parts)} at rank {self.rank}"


Value = Chunk | Sum
"""A value that can be sent, copied and added up."""


class Shape:
    """The call that an algorithm is for, and the memory of its ranks.

    `collective` is its name as in `torch.distributed`, `ranks` the number of ranks, `root` that of
    the root, `bytes` the length of the message, all shards together. `local` is how many ranks are
    on each host, where these are as many, else 1.

    Messages are cut into `chunks`. At first there is one for each rank. In reduce_scatter,
    all_gather, scatter and gather chunk c is rank c's shard. In all_to_all chunk c of an input is
    for rank c, and chunk c of an output is from rank c.
    """

    def __init__(
        self, collective: str, ranks: int, root: int = 0, bytes: int = 0, local: int = 1
    ) -> None:
        self.collective = collective
        self.ranks = ranks
        self.root = root
        self.bytes = bytes
        self.local = local
        self.parts = 1 if self.sharded else ranks
        self._recorder = Recorder(ranks)

    @classmethod
    def of(cls, call: Call) -> Shape:
        """Return what the author sees of a call."""
        return cls(call.name, call.ranks, call.root, call.whole, call.local)

    @property
    def sharded(self) -> bool:
        """Whether the message has a part for each rank, or of each."""
        return self.collective not in (*WHOLE, "barrier")

    @property
    def reduces(self) -> bool:
        """Whether the collective adds up."""
        return self.collective in ADDING

    @property
    def chunks(self) -> int:
        """The number of chunks of the whole message."""
        return self.parts * (self.ranks if self.sharded else 1)

    def cut(self, parts: int) -> None:
        """Cut the message into so many chunks, or each shard, where ranks have shards.

        Chunk c is then part c % parts of shard c // parts. Call it before anything is sent.
        """
        if not isinstance(parts, int) or not 1 <= parts <= 1 << 15:
            stop(f"cuts into {parts} parts: write a number from 1 to 32768")
        if self._recorder.operations:
            stop("cuts the message after something was written")
        self.parts = parts

    def input(self, rank: int, chunk: int = 0) -> Chunk:
        """Return a chunk of what `rank` gives. Raises AlgorithmError where it gives no such."""
        self._check(rank, chunk, "input")
        return Chunk(self, rank, chunk, Operand(INPUT, chunk), 1 << rank)

    def output(self, rank: int, chunk: int = 0) -> Chunk:
        """Return a chunk of what `rank` gets. Raises AlgorithmError where it gets no such."""
        self._check(rank, chunk, "output")
        return Chunk(self, rank, chunk, Operand(OUTPUT, chunk))

    def signal(self, rank: int, to: int) -> None:
        """Have `rank` tell rank `to` that all before this is done, without a chunk."""
        self._recorder.rank(rank, "the rank that signals")
        self._recorder.signal(rank, self._recorder.rank(to, "the rank that is told"))

    def wait(self, rank: int, from_: int) -> None:
        """Have `rank` wait for the next signal of rank `from_`, or for its next message.

        Messages are waited for where they are first used. So this is for signals, and to wait for
        a message earlier.
        """
        recorder = self._recorder
        recorder.rank(rank, "the rank that waits")
        link = recorder.link(recorder.rank(from_, "the rank that is awaited"), rank)
        recorder.wait(link, link.waited, caller())

    def _check(self, rank: int, chunk: int, side: str) -> None:
        self._recorder.rank(rank, "the rank")
        if self.collective == "barrier":
            stop("a barrier has no chunks: use signal and wait")
        if not isinstance(chunk, int) or not 0 <= chunk < self.chunks:
            stop(f"there is no chunk {chunk}: the message has chunks 0 to {self.chunks - 1}")
        owners = {
            "input": {
                "all_gather": chunk // self.parts, "gather": chunk // self.parts,
                "broadcast": self.root, "scatter": self.root,
            },
            "output": {
                "reduce_scatter": chunk // self.parts, "scatter": chunk // self.parts,
                "reduce": self.root, "gather": self.root,
            },
        }  # fmt: skip
        owner = owners[side].get(self.collective, rank)
        if owner != rank:
            stop(f"chunk {chunk} is in the {side} of rank {owner} alone, not of rank {rank}")


Algorithm = Callable[[Shape], None]
"""A function that writes down what all ranks do in a call of this shape."""


def _own(value: Value, what: str) -> Value:
    if not isinstance(value, Chunk | Sum):
        stop(f"{what} {value!r}: it takes a chunk, or a sum of chunks")
    return value


def reduce(*values: Value) -> Sum:
    """Return the sum of chunks that one rank can read, added up in this order.

    Nothing is added yet. Where the sum is sent or copied, one step reads all its chunks, and
    rounds once. A sum of sums is one sum of all their chunks. Raises AlgorithmError where ranks
    differ, or a contribution is in it twice.
    """
    if not values:
        stop("reduces nothing")
    first = _own(values[0], "reduces")
    parts: list[Chunk] = []
    for value in values:
        if _own(value, "reduces").rank != first.rank:
            stop(f"rank {first.rank} cannot read {value}: send it there")
        parts += value._parts if isinstance(value, Sum) else (value,)
    if not first._shape.reduces:
        stop(f"{first._shape.collective} adds nothing up: use copy")
    made = Sum(first._shape, first.rank, first.chunk, tuple(parts))
    made._piece()  # checks it
    return made


def copy(value: Value, to: Chunk) -> Chunk:
    """Put a chunk or a sum into the output `to` of the same rank, and return that.

    A partial sum may go there, too, and be read again. Raises AlgorithmError where ranks differ.
    """
    _own(value, "copies")
    if not isinstance(to, Chunk) or to._operand.space != OUTPUT:
        stop(f"copies into {to!r}: only outputs are written")
    if value.rank != to.rank:
        stop(f"rank {value.rank} cannot write {to}: send it there")
    value._shape._recorder.store(to.rank, to.chunk, value._piece())
    return to


@overload
def send(value: Value, to: int, *, credit: bool = True) -> Chunk: ...
@overload
def send(value: Iterable[Value], to: int, *, credit: bool = True) -> list[Chunk]: ...
def send(
    value: Value | Iterable[Value], to: int, *, credit: bool = True
) -> Chunk | list[Chunk]:  # fmt: skip
    """Send a chunk or a sum to rank `to`, and return it as that rank can read it.

    Several that go together are one message: give a list, and get one. A message lies in a slot of
    the receiver until its last use there. `credit=False` says that the slot needs no credit to be
    used again, as the algorithm's own messages tell that it was read. Raises AlgorithmError.
    """
    single = isinstance(value, Chunk | Sum)
    values = [value] if isinstance(value, Chunk | Sum) else list(value)
    if not values:
        stop("sends nothing: use shape.signal")
    first = _own(values[0], "sends")
    for part in values:
        if _own(part, "sends").rank != first.rank:
            stop(f"rank {first.rank} cannot send {part}: a message has chunks of one rank")
    shape = first._shape
    shape._recorder.rank(to, "the rank that gets it")
    pieces = [part._piece() for part in values]
    message = shape._recorder.send(first.rank, to, pieces, credit)
    link = message.link.number
    got = [
        Chunk(shape, to, part.chunk, Operand(SLOT, link, message.number, i), piece.ranks, message)
        for i, (part, piece) in enumerate(zip(values, pieces, strict=True))
    ]
    return got[0] if single else got
