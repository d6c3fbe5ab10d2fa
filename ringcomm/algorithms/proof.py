"""`ringcomm.algorithms.verify`: proves an algorithm by hand, or tells how it goes wrong."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from ringcomm import _planner
from ringcomm._text import show_size
from ringcomm.algorithms.call import MOST_RANKS, Call, call_of
from ringcomm.algorithms.language import Algorithm
from ringcomm.algorithms.program import AlgorithmError, Line
from ringcomm.algorithms.schedule import Scripts, schedule
from ringcomm.algorithms.steps import GroupPlans, Step, done

MOST_SHOWN = 24  # steps of a counterexample in its text
SLOTS = 3  # its place in a geometry


class Part(NamedTuple):
    """A step of one rank in a counterexample.

    `line` is that of the author's code; None: a roll call, or another operation. `met` is the
    number of the step, in the same list, whose signal a wait takes; -1: none.
    """

    rank: int
    line: Line | None
    text: str
    segment: int  # the pass of a long message
    met: int = -1

    def __str__(self) -> str:
        where = str(self.line) if self.line else "by the library"
        after = f"   (the signal of step {self.met + 1})" if self.met >= 0 else ""
        segment = f", segment {self.segment}" if self.segment else ""
        return f"rank {self.rank}  {where}  {self.text}{segment}{after}"


@dataclass(frozen=True)
class Counterexample:
    """How an algorithm goes wrong: the shortest run that shows it, as `str()` and as data.

    `what` is the sentence, `when` says in which sequence of operations: "alone", "in place", "after
    itself", or between two others. `parts` are the steps that come before, in an order in which
    they can happen. `found` is the last one, which goes wrong, and `other` the number of the step
    that is in its way; -1: none. In a deadlock `stuck` is where each rank is.
    """

    what: str
    when: str
    memory: str  # "on one host" or "between hosts"
    parts: list[Part] = field(default_factory=list)
    found: int = -1
    other: int = -1
    stuck: list[Part] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.what} ({self.when}, {self.memory})"]
        if self.stuck:
            lines.append("where the ranks are:")
            return "\n".join([*lines, *(f"  {part}" for part in self.stuck)])
        if self.parts:
            lines.append(f"the shortest run that shows it has {len(self.parts)} steps:")
        skipped = max(0, len(self.parts) - MOST_SHOWN)
        if skipped:
            lines.append(f"       ({skipped} before these)")
        for number, part in enumerate(self.parts[skipped:], skipped):
            mark = {self.found: ">", self.other: "*"}.get(number, " ")
            lines.append(f"  {mark} {number + 1:3}  {part}")
        if self.found < 0 <= self.other:
            lines.append("  * has written it")
        elif self.other >= 0:
            lines.append("  > goes wrong because of *: no signal orders them")
        return "\n".join(lines)


class Spare(NamedTuple):
    """A signal that is not needed: without it the proof still holds."""

    line: Line | None  # None: the library's own
    from_: int
    to: int
    lane: str
    number: int  # among this pair's signals on this lane

    def __str__(self) -> str:
        where = str(self.line) if self.line else "by the library"
        what = f"signal {self.number} from rank {self.from_} to rank {self.to}"
        return f"{where}: {what} ({self.lane})"


@dataclass(frozen=True)
class Proof:
    """The result of a proof: what it covers, and the plans that it is about.

    `sent` is how many bytes each rank puts into others' memory, `messages` how many signals with
    data it sends. `dropped` is how many plans without one signal were tried, of which those in
    `spare` were as good.
    """

    collective: str
    ranks: int
    bytes: int
    sent: list[int]
    messages: list[int]
    calls: int
    seconds: float
    dropped: int = 0
    spare: list[Spare] = field(default_factory=list)

    def __str__(self) -> str:
        calls = f", {self.calls} of them a roll call" if self.calls else ""
        lines = [
            f"proved in {self.seconds:.2f} s: {self.collective} of {show_size(self.bytes)} bytes, "
            f"{self.ranks} ranks, on one host and between hosts",
            f"a rank sends {max(self.sent):,} bytes at most, in {max(self.messages)} messages"
            f"{calls}",
        ]
        if self.dropped:
            wrong = self.dropped - len(self.spare)
            lines.append(f"of {self.dropped} plans without one signal, {wrong} are wrong")
        return "\n".join(lines)


Geometry = list[int]
"""The lengths of a group's memory, in the order of csrc/verify/module.cc."""


def check_by_hand(call: Call) -> None:
    """Raise ValueError where no plan by hand is for such a call."""
    if call.ranks < 2:
        raise ValueError(f"a group of {call.ranks} ranks: plans are for 2 to {MOST_RANKS}")
    if len(set(call.send)) > 1:
        raise ValueError(f"{call.whole} bytes for {call.ranks} ranks: parts must be equal, by hand")


def verify(
    algorithm: Algorithm,
    ranks: int = 8,
    bytes: int = 1 << 20,
    collective: str = "all_reduce",
    *,
    root: int = 0,
    local: int = 1,
    element: int = 4,
    mutants: bool = False,
) -> Proof:
    """Prove that the plans of an algorithm do what the collective promises.

    Every rank's plan is run symbolically, for ranks of one host and of several. The proof is that
    of docs/plans.md: contents, no race, no deadlock, bounds, one writer of each byte, closed after
    itself and between all plans of the library. `bytes` is the whole message, all shards together,
    `element` the length of a number in bytes, `local` the ranks of each host.

    With `mutants`, each signal is left out in turn, and the `spare` ones of the result are those
    that the proof does not need. Raises AlgorithmError, with the line and a `counterexample`,
    and ValueError where there is no such group or message.
    """
    began = time.perf_counter()
    if local < 1 or ranks % local:
        raise ValueError(f"{ranks} ranks do not fill hosts of {local}")
    if collective == "all_to_all":  # parts are equal
        bytes -= bytes % max(1, element * ranks)
    call = call_of(collective, ranks, bytes, ranks // local, element, root)
    check_by_hand(call)
    dropped, spare = 0, []
    for mapped in (True, False):
        geometry = _planner.geometry(ranks, mapped)
        scripts = schedule(algorithm, call, geometry[SLOTS])
        prove(geometry, scripts, "on one host" if mapped else "between hosts")
        if mutants:
            count, spares = _planner.mutants(call, geometry, scripts.words)
            dropped += count
            spare += [_spare(scripts, *signal) for signal in spares]
    steps = steps_of(geometry, scripts)
    sent = [sum(step.bytes for step in own if step.receiver(r) >= 0) for r, own in enumerate(steps)]
    messages = [sum(step.verb == "signal" and step.lane == "data" for step in own) for own in steps]
    seconds = time.perf_counter() - began
    once = [*dict.fromkeys(spare)]  # the same on one host and on several
    return Proof(*(collective, ranks, bytes, sent, messages, scripts.calls, seconds, dropped), once)


def _spare(scripts: Scripts, from_: int, to: int, lane: int, index: int, origin: int) -> Spare:
    return Spare(scripts.ranks[from_].lines[origin], from_, to, ("data", "credit")[lane], index)


def steps_of(geometry: Geometry, scripts: Scripts) -> list[list[Step]]:
    """Return the steps of each rank's plan."""
    call = scripts.call
    return [done(_planner.steps(call, geometry, r, words)) for r, words in enumerate(scripts.words)]


def plans_by_hand(call: Call, algorithm: Algorithm, name: str) -> GroupPlans:
    """Return the plans of all ranks; they are not proved.

    Raises AlgorithmError with the line of its code, and ValueError where it takes no such call.
    """
    check_by_hand(call)
    geometry = _planner.geometry(call.ranks, call.hosts == 1)
    scripts = schedule(algorithm, call, geometry[SLOTS])
    return GroupPlans(call, name, steps_of(geometry, scripts))


def prove(geometry: Geometry, scripts: Scripts, memory: str) -> None:
    """Raise AlgorithmError where the scripts are wrong."""
    try:
        failure = _planner.prove(scripts.call, geometry, scripts.words)
    except ValueError as error:
        raise AlgorithmError(str(error), scripts.function) from None
    if failure is None:
        return
    when, text, stuck, event, other, events, places = failure

    def part(told: tuple[int, int, int, int, int, str]) -> Part:
        rank, operation, origin, pass_, met, words = told
        line = scripts.ranks[rank].lines[origin] if origin >= 0 else None
        words = re.sub(r" \([^()]* a pass\)", "", words)  # where it is in other segments
        return Part(rank, line, words or f"a step of operation {operation}", pass_, met)

    what = _plain(text, scripts)
    if stuck:
        shown = Counterexample(what, when, memory, stuck=[part(place) for place in places])
        line = next((place.line for place in shown.stuck if place.line), scripts.function)
    else:
        shown = Counterexample(what, when, memory, [part(step) for step in events], event, other)
        first = event if event >= 0 else other
        line = (shown.parts[first].line if first >= 0 else None) or scripts.function
    raise AlgorithmError(f"{what}: {when}, {memory}", line, shown)


def _plain(text: str, scripts: Scripts) -> str:
    """Say it without the names that plans have in the library."""
    text = re.sub(r"operation \d+ \((\w+) tree\)", r"\1", text)
    if text.startswith("deadlock"):
        return "deadlock: every rank that has not ended waits for a signal that does not come"
    text = re.sub(r", block \d+ pass (\d+) round \d+, ", r", segment \1, ", text)
    call = scripts.call
    wrong = re.match(r"operation \d+: (rank \d+'s output at byte \d+)( was never written)?", text)
    if wrong:
        never = " was never written: no line copies it there"
        return f"{call.name}: {wrong[1]}{never if wrong[2] else _lacks(text, call.ranks)}"
    return text


MASK = (1 << 64) - 1


def _mark(rank: int) -> int:
    """The mark of a rank's contribution: `mark` in csrc/verify/memory.h."""
    z = (0x5EED * 0x9E3779B97F4A7C15 + rank + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def _lacks(text: str, ranks: int) -> str:
    """Say which contributions are not what they should be."""
    match = re.search(
        r"ranks (\d+), byte (\d+), final (\d), where it should be (\d+), (\d+), (\d)", text
    )
    if not match:
        return " is wrong"
    held, byte, _, wanted, should, _ = map(int, match.groups())
    marks = {_mark(rank): rank for rank in range(ranks)}
    if (wanted - held) & MASK in marks:
        return f" lacks what rank {marks[(wanted - held) & MASK]} gives"
    if (held - wanted) & MASK in marks:
        return f" has twice what rank {marks[(held - wanted) & MASK]} gives"
    if held in marks and wanted in marks and held != wanted:
        return f" has what rank {marks[held]} gives, in place of rank {marks[wanted]}'s"
    if byte != should:
        return f" has byte {byte} of an input, in place of byte {should}"
    return " has not the sum of all ranks"
