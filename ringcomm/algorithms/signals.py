"""The order that a recorded program's signals enforce, and signals that it lacks: for schedule.py.

The order is computed with vector clocks (Fidge 1988; Mattern 1989), for signals of the data lane
alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ringcomm.algorithms.program import (
    INPUT,
    OUTPUT,
    SLOT,
    Link,
    Move,
    Operation,
    Recorder,
    Signal,
    Wait,
)

SIGNAL, WAIT = 1, 2  # as csrc/plan/script.h
FEW = 16  # ranks of which one may talk to all others: kFewEnds
MOST_STEPS = 1_000_000  # in the analysis; beyond, all credits are given


def played(
    programs: Sequence[Sequence[Any]], step: Callable[[int, int, int], bool], passes: int = 1
) -> bool:
    """Run programs in turns, each as far as `step` lets it: False says that it has to wait.

    `step` gets the rank, the pass, and the place in the program. Returns whether all came to their
    ends.
    """
    place = [0] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            end = passes * len(program)
            while place[rank] < end and step(rank, *divmod(place[rank], len(program))):
                place[rank] += 1
                moved = True
    return all(place[rank] == passes * len(program) for rank, program in enumerate(programs))


class Order:
    """The order that signals of the data lane enforce, from several passes over the programs."""

    def __init__(self, recorder: Recorder, slots: int) -> None:
        self.recorder = recorder
        self.slots = slots
        self.links = list(recorder.links.values())
        self.passes = self._passes()
        # Before an operation that writes a slot: how much of the reader's program has been done.
        self.known: dict[tuple[int, int], list[int]] = {}  # by link and message, of each pass
        # After a wait for a message, in the first pass: its time. And at a write of the output.
        self.at_output: dict[tuple[int, int], list[int]] = {}
        self.taken: dict[tuple[int, int], int] = {}
        self.complete = self._run()
        self.releases: list[dict[int, list[tuple[int, int]]]] = [{} for _ in recorder.programs]
        for link in recorder.links.values():
            at = -1
            for message in link.messages:
                at = max(at, message.last_use)
                self.releases[link.to].setdefault(at, []).append((link.number, message.number))

    def _passes(self) -> int:
        most = 1
        for link in self.recorder.links.values():
            if per := len(link.messages):
                most = max(most, (self.slots + per - 1) // per + 1)
        return most if most * self.recorder.operations <= MOST_STEPS else 1

    def _run(self) -> bool:
        """Run all programs, each as far as its messages are there. False: some are stuck."""
        programs = self.recorder.programs
        clocks = [[0] * len(programs) for _ in programs]
        lanes: list[deque[list[int]]] = [deque() for _ in self.links]

        def step(rank: int, pass_: int, at: int) -> bool:
            clock, operation = clocks[rank], programs[rank][at]
            time = pass_ * len(programs[rank]) + at + 1
            if isinstance(operation, Wait):
                lane = lanes[operation.link.number]
                if not lane:
                    return False
                clock = clocks[rank] = list(map(max, clock, lane.popleft()))
                if pass_ == 0:
                    self.taken[operation.link.number, operation.number] = time
            elif isinstance(operation, Signal):
                clock[rank] = time
                lanes[operation.message.link.number].append(clock.copy())
            else:
                self._note(rank, at, pass_, operation, clock)
            clock[rank] = time
            return True

        return played(programs, step, self.passes)

    def _note(self, rank: int, at: int, round_: int, move: Move, clock: list[int]) -> None:
        for dst in move.dst:
            if dst.space == OUTPUT and round_ == 0:
                self.at_output[rank, at] = clock.copy()
            elif dst.space == SLOT and dst.piece == 0:
                to = self.links[dst.chunk].to
                self.known.setdefault((dst.chunk, dst.message), []).append(clock[to])

    def credits(self, link: Link) -> list[bool]:
        """Say for each message of a pass whether the slot that it uses again needs a credit."""
        per = len(link.messages)
        needs = [message.credit for message in link.messages]
        if not self.complete:
            return needs
        for number, earlier in enumerate(link.messages):
            later, passes = (self.slots + number) % per, (self.slots + number) // per
            known = self.known[link.number, later]
            if passes < len(known) and known[passes] > earlier.last_use:
                needs[later] = False  # the message says that the earlier one was read
        return needs

    def protect(self) -> None:
        """Have sources that are overwritten too early be added up alone, in place of copied.

        The source of a copy into another's slot must stay until its message is taken. That of a
        reduce is free at once.
        """
        for rank, program in enumerate(self.recorder.programs):
            written: dict[int, list[int]] = {}
            for at, operation in enumerate(program):
                if isinstance(operation, Move):
                    for dst in operation.dst:
                        if dst.space == OUTPUT:
                            written.setdefault(dst.chunk, []).append(at)
            for at, operation in enumerate(program):
                if isinstance(operation, Move) and self._lends(operation):
                    chunk = operation.src[0].chunk
                    later = [write for write in written.get(chunk, []) if write > at]
                    operation.adds = any(self._early(rank, operation, write) for write in later)

    def _lends(self, move: Move) -> bool:
        mine = move.src[0].space in (INPUT, OUTPUT)
        return move.dst[0].space == SLOT and mine and not move.adds and not move.whole

    def _early(self, rank: int, move: Move, write: int) -> bool:
        link = self.links[move.dst[0].chunk]
        message = link.messages[move.dst[0].message]
        taken = self.taken.get((link.number, message.lane))
        return taken is None or self.at_output[rank, write][link.to] < taken


class Calls:
    """The roll call: signals so that where a plan ends, it has begun on every rank.

    One rank hears of all, before its own program or after it, and tells those that do not know.
    Of all ranks that could, it is the one that needs the fewest signals. Beyond 16 ranks calls go
    along a binomial tree.
    """

    def __init__(self, recorder: Recorder, root: int) -> None:
        self.before: list[list[tuple[int, int]]] = [[] for _ in range(recorder.ranks)]
        self.after: list[list[tuple[int, int]]] = [[] for _ in range(recorder.ranks)]
        self.count = 0
        self.recorder = recorder
        all_ = recorder.everybody
        known = self._known([1 << rank for rank in range(recorder.ranks)])
        if all(ranks == all_ for ranks in known):
            return
        if recorder.ranks > FEW:
            self._along_tree(root, known)
            return
        plans = [plan for hub in self._hubs(root) for plan in self._plans(hub, known)]
        hub, early, late, told = min(plans, key=lambda plan: sum(map(len, plan[1:])))
        for rank in early:
            self._call(self.before, rank, hub)
        for rank in late:
            self._call(self.after, rank, hub)
        for rank in told:
            self._call(self.after, hub, rank)

    def _hubs(self, root: int) -> list[int]:
        return [root, *(rank for rank in range(self.recorder.ranks) if rank != root)]

    def _plans(
        self, hub: int, known: list[int]
    ) -> list[tuple[int, list[int], list[int], list[int]]]:
        """Return both ways: the ranks that call before and after, and those that are told."""
        all_, ranks = self.recorder.everybody, range(self.recorder.ranks)
        start = [all_ if rank == hub else 1 << rank for rank in ranks]
        then = self._known(start)
        others = [rank for rank in ranks if rank != hub]
        early: tuple[int, list[int], list[int], list[int]]
        early = (hub, others, [], [rank for rank in ranks if then[rank] != all_])
        unknown = [rank for rank in ranks if not known[hub] >> rank & 1]
        late: tuple[int, list[int], list[int], list[int]]
        late = (hub, [], unknown, [rank for rank in others if known[rank] != all_])
        return [early, late]

    def _call(self, when: list[list[tuple[int, int]]], from_: int, to: int) -> None:
        when[from_].append((SIGNAL, to))
        when[to].append((WAIT, from_))
        self.count += 1

    def _along_tree(self, root: int, known: list[int]) -> None:
        ranks, all_ = self.recorder.ranks, self.recorder.everybody
        start = [all_ if rank == root else 1 << rank for rank in range(ranks)]
        then = self._known(start)
        early = all(bits == all_ for bits in then)
        when = self.before if early else self.after
        parents = [(v & (v - 1), v) for v in range(1, ranks)]
        if early or known[root] != all_:
            for parent, v in sorted(parents, reverse=True, key=lambda pair: pair[1]):
                self._call(when, (v + root) % ranks, (parent + root) % ranks)
        if not early:
            for parent, v in parents:
                self._call(when, (parent + root) % ranks, (v + root) % ranks)

    def _known(self, start: list[int]) -> list[int]:
        """Return the ranks that each knows to have begun, as bits, at the end of a pass."""
        known, programs = list(start), self.recorder.programs
        lanes: list[deque[int]] = [deque() for _ in self.recorder.links]

        def step(rank: int, _: int, at: int) -> bool:
            operation = programs[rank][at]
            if isinstance(operation, Wait):
                if not lanes[operation.link.number]:
                    return False
                known[rank] |= lanes[operation.link.number].popleft()
            elif isinstance(operation, Signal):
                lanes[operation.message.link.number].append(known[rank])
            return True

        played(programs, step)
        return known


def flows(recorder: Recorder, order: Order, needs: dict[int, list[bool]]) -> bool:
    """Say whether all programs come to their end with so few slots, whatever the passes."""
    per = [max(1, len(link.messages)) for link in order.links]
    programs = [_flow(program, order.releases[r]) for r, program in enumerate(recorder.programs)]
    sent, taken, freed = ([0] * len(order.links) for _ in range(3))

    def step(rank: int, pass_: int, at: int) -> bool:
        verb, link, number = programs[rank][at]
        if verb == "acquire" and needs[link][number]:
            if freed[link] < pass_ * per[link] + number + 1 - order.slots:
                return False
        elif verb == "wait" and taken[link] >= sent[link]:
            return False
        sent[link] += verb == "signal"
        taken[link] += verb == "wait"
        freed[link] += verb == "release"
        return True

    return played(programs, step, order.passes + 1)


def _flow(
    program: list[Operation], releases: dict[int, list[tuple[int, int]]]
) -> list[tuple[str, int, int]]:
    """Return what may have to wait in a program, and what others wait for."""
    steps: list[tuple[str, int, int]] = []
    for at, operation in enumerate(program):
        if isinstance(operation, Wait):
            steps.append(("wait", operation.link.number, 0))
        elif isinstance(operation, Signal):
            steps.append(("signal", operation.message.link.number, 0))
        freed = [("release", link, message) for link, message in releases.get(at, [])]
        if not isinstance(operation, Move):
            steps += freed
            continue
        first, *more = [
            [("acquire", dst.chunk, dst.message)] if (dst.space, dst.piece) == (SLOT, 0) else []
            for dst in operation.dst
        ]
        steps += [*first, *freed]
        for acquired in more:
            steps += acquired
    return steps
