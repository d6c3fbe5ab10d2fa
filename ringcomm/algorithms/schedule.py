"""Makes scripts of recorded programs: what csrc/plan/script.h turns into plans.

It adds what the author does not write: releases of slots and the credits that are needed, and the
roll call. Both follow from what signals enforce (signals.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from ringcomm.algorithms.call import Call
from ringcomm.algorithms.language import Algorithm, Shape
from ringcomm.algorithms.program import (
    SLOT,
    AlgorithmError,
    Line,
    Move,
    Operand,
    Recorder,
    Signal,
    Wait,
    caller,
)
from ringcomm.algorithms.signals import Calls, Order, flows

MOVE, SIGNAL, WAIT, ACQUIRE, RELEASE = range(5)  # as csrc/plan/script.h
DATA, CREDIT = range(2)
MOST_SLOTS = 256


class Script(NamedTuple):
    """One rank's plan for csrc/plan/script.h, and the line of each of its operations."""

    words: list[int]
    lines: list[Line | None]


@dataclass
class Scripts:
    """The scripts of all ranks. `code` is their hash, which differs for another algorithm."""

    call: Call
    ranks: list[Script]
    calls: int  # signals of the roll call
    code: int
    function: Line  # where the author's is defined

    @property
    def words(self) -> list[list[int]]:
        """The scripts, as the verifier takes them."""
        return [script.words for script in self.ranks]


def record(algorithm: Algorithm, shape: Shape) -> Recorder:
    """Run an algorithm, once for all ranks. Raises AlgorithmError, with the author's line."""
    try:
        algorithm(shape)
    except AlgorithmError:
        raise
    except Exception as error:
        raise AlgorithmError(_told(algorithm, shape, error), _line_of(error)) from error
    recorder = shape._recorder
    for link in recorder.links.values():
        for message in link.lane:
            taken = message.last_use >= 0 if message.pieces else message.lane < link.waited
            if not taken:
                what = "message" if message.pieces else "signal"
                raise AlgorithmError(
                    f"the {what} from rank {link.from_} to rank {link.to} is never taken there",
                    message.line,
                )
    return recorder


def _told(algorithm: Algorithm, shape: Shape, error: Exception) -> str:
    name = getattr(algorithm, "__name__", "the algorithm")
    return (
        f"{name} cannot plan this {shape.collective} of {shape.bytes:,} bytes for {shape.ranks} "
        f"ranks: {type(error).__name__}: {error}"
    )


def _line_of(error: BaseException) -> Line | None:
    """The innermost line of the traceback that is not this package's."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if (
            "ringcomm/algorithms/schedule.py" not in file
            and "ringcomm/algorithms/language.py" not in file
        ):
            line = Line(file, trace.tb_lineno)
        trace = trace.tb_next
    return line


def line_of(algorithm: Algorithm) -> Line:
    """Return where the function is defined."""
    code = getattr(algorithm, "__code__", None)
    return Line(code.co_filename, code.co_firstlineno) if code else caller()


def schedule(algorithm: Algorithm, call: Call, slots: int) -> Scripts:
    """Make the scripts of all ranks, for inboxes of so many slots. Raises AlgorithmError."""
    shape = Shape.of(call)
    recorder = record(algorithm, shape)
    order, needs = _order(recorder, slots)
    if shape.reduces:
        order.protect()
    calls = Calls(recorder, shape.root)
    made = [_script(rank, recorder, shape, needs, calls, order) for rank in range(recorder.ranks)]
    text = repr([script.words for script in made]).encode()
    code = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return Scripts(call, made, calls.count, code, line_of(algorithm))


def _order(recorder: Recorder, slots: int) -> tuple[Order, dict[int, list[bool]]]:
    """Find how many slots the algorithm needs.

    Where it has many messages under way, it gets more and smaller ones. If it has no end with any,
    by its own fault, it keeps those that there are.
    """
    tried: tuple[Order, dict[int, list[bool]]] | None = None
    count = slots
    while count <= MOST_SLOTS:
        order = Order(recorder, count)
        needs = {link.number: order.credits(link) for link in order.links}
        if not order.complete or flows(recorder, order, needs):
            return order, needs
        tried = tried or (order, needs)
        count *= 2
    assert tried
    return tried


class _Writer:
    """Writes the words of one rank's script, and the line of each operation."""

    def __init__(self) -> None:
        self.words: list[int] = []
        self.lines: list[Line | None] = []

    def operation(self, line: Line | None, *words: int) -> None:
        self.words += words
        self.lines.append(line)


def _script(
    rank: int,
    recorder: Recorder,
    shape: Shape,
    needs: dict[int, list[bool]],
    calls: Calls,
    order: Order,
) -> Script:
    links = [link for link in recorder.links.values() if rank in (link.from_, link.to)]
    local = {link.number: number for number, link in enumerate(links)}
    most = max((m.pieces for link in recorder.links.values() for m in link.messages), default=1)
    head = [shape.parts, order.slots, max(1, most), len(links)]
    for link in links:
        pieces = max((message.pieces for message in link.messages), default=1)
        credits = [int(need) for need in needs[link.number]]
        head += [link.from_, link.to, pieces, len(credits), *credits]
    sections = [_calls(calls.before[rank]), _Writer(), _calls(calls.after[rank])]
    for at, operation in enumerate(recorder.programs[rank]):
        freed = [(local[link], message) for link, message in order.releases[rank].get(at, [])]
        if isinstance(operation, Move):
            _move(sections[1], operation, local, needs, freed)
        else:
            _synchronize(sections[1], operation)
            _release(sections[1], operation.line, freed)
    words, lines = head, []
    for section in sections:
        words = [*words, len(section.lines), *section.words]
        lines += section.lines
    return Script(words, lines)


def _calls(calls: list[tuple[int, int]]) -> _Writer:
    writer = _Writer()
    for verb, peer in calls:
        writer.operation(None, verb, peer, CREDIT)
    return writer


def _synchronize(writer: _Writer, operation: Signal | Wait) -> None:
    if isinstance(operation, Wait):
        writer.operation(operation.line, WAIT, operation.link.from_, DATA)
    else:
        writer.operation(operation.line, SIGNAL, operation.message.link.to, DATA)


def _release(writer: _Writer, line: Line, freed: list[tuple[int, int]]) -> None:
    for link, message in freed:
        writer.operation(line, RELEASE, link, message)


def _move(
    writer: _Writer,
    move: Move,
    local: dict[int, int],
    needs: dict[int, list[bool]],
    freed: list[tuple[int, int]],
) -> None:
    """Write a step, and beside it one for each slot that needs a credit.

    The peer may give that credit only after a step like this one of its own. So it is not waited
    for before the sum is made, and what this step has read is released first.
    """

    def words(dst: list[Operand], src: tuple[Operand, ...], final: bool, adds: bool) -> list[int]:
        words = [MOVE, move.chunk, int(final), int(adds), len(dst), len(src)]
        for operand in (*dst, *src):
            number = local[operand.chunk] if operand.space == SLOT else operand.chunk
            words += [operand.space, number, operand.message, operand.piece]
        return words

    def acquire(slot: Operand) -> None:
        if slot.space == SLOT and slot.piece == 0:
            writer.operation(move.line, ACQUIRE, local[slot.chunk], slot.message)

    first, *more = move.dst
    apart = [dst for dst in more if needs[dst.chunk][dst.message]]
    acquire(first)
    together = [first, *(dst for dst in more if dst not in apart)]
    writer.operation(move.line, *words(together, move.src, move.final, move.adds))
    _release(writer, move.line, freed)
    for slot in apart:
        acquire(slot)
        writer.operation(move.line, *words([slot], (first,), False, not move.whole))
