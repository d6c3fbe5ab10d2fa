"""The notes of an algorithm by hand: one program for each rank, and the messages between.

`Recorder` is behind the functions of language.py. It notes each operation with the line of the
author's code, and adds the waits. schedule.py makes the rest of a plan from it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from ringcomm._runtime import lines

MOST_OPERATIONS = 1_000_000
MOST_LOOKS = 10_000_000
INPUT, OUTPUT, SLOT = range(3)


class Line(NamedTuple):
    """A line of the author's code."""

    file: str
    number: int

    def __str__(self) -> str:
        # A notebook gives each cell a file that its author has never seen.
        cell = Path(self.file).parent.name.startswith("ipykernel_")
        return f"{'cell' if cell else Path(self.file).name}:{self.number}"


class AlgorithmError(ValueError):
    """An algorithm is wrong; the text begins with the line of its code, where there is one.

    `line` is that line. `counterexample` is how it goes wrong, where running it showed that: a
    `ringcomm.algorithms.Counterexample`.
    """

    def __init__(
        self, text: str, line: Line | None = None, counterexample: object = None
    ) -> None:  # fmt: skip
        super().__init__(f"{line}: {text}" if line else text)
        self.line = line
        self.counterexample = counterexample

    @property
    def story(self) -> object:
        """The name of `counterexample` from before 1.0."""
        return self.counterexample


def caller() -> Line:
    """Return the line that called into this package."""
    frame = lines.frame_outside(lines.OURS) or sys._getframe()
    return Line(frame.f_code.co_filename, frame.f_lineno)


def stop(text: str) -> NoReturn:
    raise AlgorithmError(text, caller())


class Operand(NamedTuple):
    """A place of one chunk: in input or output, or in a message's slot."""

    space: int
    chunk: int  # in input or output; else the number of the link
    message: int = 0  # on the link
    piece: int = 0  # in the message


@dataclass
class Move:
    """A copy, or a reduce where it has several sources, or `adds`."""

    dst: list[Operand]
    src: tuple[Operand, ...]
    chunk: int  # that has its length
    final: bool
    adds: bool
    whole: bool  # it has the contributions of all ranks
    line: Line


@dataclass
class Signal:
    message: Message
    line: Line


@dataclass
class Wait:
    link: Link
    number: int  # in the lane: the message that it waits for
    line: Line


Operation = Move | Signal | Wait


@dataclass
class Message:
    """The pieces that one signal announces; none where it is a signal alone."""

    link: Link
    lane: int  # its number among the link's signals
    number: int  # among its messages with pieces; -1: a signal alone
    pieces: int
    credit: bool
    line: Line
    written: int = -1  # the first operation of the writer's program that writes into its slot
    last_use: int = -1  # the last one of the reader's program that reads it


@dataclass
class Link:
    """All that one rank sends to another."""

    number: int
    from_: int
    to: int
    lane: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)  # those with pieces
    waited: int = 0


class Term(NamedTuple):
    """One operand of a sum, with the ranks whose contributions it holds, as bits."""

    operand: Operand
    ranks: int
    message: Message | None


class Recorder:
    """The programs of all ranks, in the order in which the author wrote them down."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.everybody = (1 << ranks) - 1
        self.programs: list[list[Operation]] = [[] for _ in range(ranks)]
        self.links: dict[tuple[int, int], Link] = {}
        self.held: dict[tuple[int, int], tuple[int, Line]] = {}  # by rank and chunk of output
        self.operations = 0
        self.looks = 0

    def rank(self, rank: int, what: str) -> int:
        self.looks += 1
        if self.looks > MOST_LOOKS:
            stop(f"the algorithm has named {MOST_LOOKS:,} ranks and goes on: does this loop end?")
        if not isinstance(rank, int):
            stop(f"{what} is a number, not {rank!r}")
        if not 0 <= rank < self.ranks:
            stop(f"{what} is {rank}: the group has ranks 0 to {self.ranks - 1}")
        return rank

    def link(self, from_: int, to: int) -> Link:
        if from_ == to:
            stop(f"rank {from_} sends to itself: use copy")
        link = self.links.get((from_, to))
        if link is None:
            link = self.links[from_, to] = Link(len(self.links), from_, to)
        return link

    def add(self, rank: int, operation: Operation) -> None:
        self.operations += 1
        if self.operations > MOST_OPERATIONS:
            stop(
                f"the algorithm has written {MOST_OPERATIONS:,} operations and goes on: does this "
                "loop end?"
            )
        self.programs[rank].append(operation)

    def read(self, rank: int, terms: Sequence[Term], line: Line) -> tuple[Operand, ...]:
        """Have the rank wait for the messages that it is about to read."""
        program = self.programs[rank]
        for _, _, message in terms:
            if message is not None and message.lane >= message.link.waited:
                self.wait(message.link, message.lane, line)
        for _, _, message in terms:
            if message is not None:
                message.last_use = len(program)
        return tuple([term.operand for term in terms])

    def wait(self, link: Link, upto: int, line: Line) -> None:
        for number in range(link.waited, upto + 1):
            self.add(link.to, Wait(link, number, line))
        link.waited = upto + 1

    def send(self, from_: int, to: int, pieces: Sequence[Piece], credit: bool) -> Message:
        link, line = self.link(from_, to), caller()
        message = Message(link, len(link.lane), len(link.messages), len(pieces), credit, line)
        for number, piece in enumerate(pieces):
            slot = Operand(SLOT, link.number, message.number, number)
            self._write(from_, slot, piece, message if len(pieces) == 1 else None, line)
            if message.written < 0:
                message.written = len(self.programs[from_]) - 1
        link.messages.append(message)
        link.lane.append(message)
        self.add(from_, Signal(message, line))
        return message

    def signal(self, from_: int, to: int) -> None:
        link, line = self.link(from_, to), caller()
        message = Message(link, len(link.lane), -1, 0, True, line)
        link.lane.append(message)
        self.add(from_, Signal(message, line))

    def store(self, rank: int, chunk: int, piece: Piece) -> None:
        """Write the output."""
        line = caller()
        before = self.held.get((rank, chunk))
        if before and before[0] == self.everybody and piece.adds:
            since = before[1]
            stop(f"writes chunk {chunk} of rank {rank}'s output again: it was whole since {since}")
        self._write(rank, Operand(OUTPUT, chunk), piece, None, line)
        self.held[rank, chunk] = (piece.ranks, line)

    def _write(
        self, rank: int, dst: Operand, piece: Piece, single: Message | None, line: Line
    ) -> None:
        program = self.programs[rank]
        last = program[-1] if program else None
        # A sum that was put into the output and is now sent: one step with two destinations.
        if (
            single is not None
            and isinstance(last, Move)
            and last.adds
            and piece.terms[0].operand == last.dst[-1]
            and not piece.adds
            and len(last.dst) < 100
        ):
            last.dst.append(dst)
            return
        src = self.read(rank, piece.terms, line)
        whole = piece.ranks == self.everybody
        final = piece.adds and whole
        self.add(rank, Move([dst], src, piece.chunk, final, piece.adds, whole, line))


class Piece(NamedTuple):
    """A value that is written somewhere: one operand, or a sum of several."""

    terms: tuple[Term, ...]
    chunk: int
    adds: bool

    @property
    def ranks(self) -> int:
        ranks = 0
        for term in self.terms:
            ranks |= term.ranks
        return ranks
