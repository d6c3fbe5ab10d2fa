"""A plan's work in rounds: whose inputs each rank has, of which part of the message.

The plans run on names: a byte is known by its place in the message, and by the ranks whose inputs
are added up in it. A message belongs to round k if the longest chain of messages that its sender
had taken before has k - 1: Lamport, "Time, clocks, and the ordering of events in a distributed
system", 1978.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringcomm.algorithms.call import Call
from ringcomm.algorithms.steps import GroupPlans, Operand, Step

Memory = tuple[str, int, int]  # space, rank, writer


class Segment(NamedTuple):
    """Bytes from `begin` to `end` of a memory, or of an operand.

    They are the message's from `place` on, with the inputs of the ranks in `ranks` added up.
    """

    begin: int
    end: int
    place: int
    ranks: frozenset[int]


class Transfer(NamedTuple):
    """A part of the message that goes from rank to rank in a round."""

    round: int
    sender: int
    receiver: int
    low: int  # bytes of the message
    high: int
    ranks: frozenset[int]


State = tuple[tuple[Memory, Segment], ...]  # all that a rank has, in its own memory


@dataclass
class Story:
    """`states[r]` are the rank's, each with the round since which it holds, in order."""

    call: Call
    chunks: list[tuple[int, int]]  # parts of the message that never go apart, in bytes
    transfers: list[Transfer]
    states: list[list[tuple[int, State]]]
    rounds: list[int]  # those in which something goes from rank to rank

    def state(self, rank: int, round_number: int) -> State:
        """Return what the rank has after a round; 0 is the start."""
        return [state for since, state in self.states[rank] if since <= round_number][-1]

    def pieces(self, rank: int, round_number: int, chunk: int) -> list[frozenset[int]]:
        """Return the sums of a chunk that the rank has: the largest, then what it lacks."""
        low, high = self.chunks[chunk]
        sums = {
            segment.ranks
            for _, segment in self.state(rank, round_number)
            if segment.place <= low and high <= segment.place + segment.end - segment.begin
        }
        taken: list[frozenset[int]] = []
        for ranks in sorted(sums, key=lambda ranks: (-len(ranks), sorted(ranks))):
            if not any(ranks & other for other in taken):
                taken.append(ranks)
        return taken

    def wanted(self, rank: int, chunk: int) -> bool:
        """Tell whether the rank's output has a place for the chunk."""
        low, high = self.chunks[chunk]
        begin, end = output_of(self.call, rank)
        return begin <= low and high <= end

    def done(self, rank: int, round_number: int, chunk: int) -> bool:
        """Tell whether the output has the chunk, with everything that belongs into it."""
        if not self.wanted(rank, chunk):
            return False
        low, high = self.chunks[chunk]
        there: set[int] = set()
        largest = 0
        for (space, *_), segment in self.state(rank, round_number):
            end = segment.place + segment.end - segment.begin
            if space == "output" and segment.place <= low and high <= end:
                there |= segment.ranks
                largest = max(largest, len(segment.ranks))
        whole = self.call.ranks
        if self.call.adds:
            return largest == whole
        return len(there) == (whole if self.call.name == "all_to_all" else 1)


def offsets(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def input_of(call: Call, rank: int) -> tuple[int, int]:
    """Return which bytes of the message a rank's input has; all_to_all: that of each rank."""
    if call.name in ("all_gather", "gather"):
        at = offsets(call.shards)
        return at[rank], at[rank + 1]
    if call.name in ("broadcast", "scatter") and rank != call.root:
        return 0, 0
    return 0, call.whole


def output_of(call: Call, rank: int) -> tuple[int, int]:
    """Return the same of its output."""
    if call.name in ("reduce_scatter", "scatter", "all_to_all"):
        at = offsets(call.shards or call.send)
        return at[rank], at[rank + 1]
    if call.name in ("reduce", "gather") and rank != call.root:
        return 0, 0
    return 0, call.whole


# ---- the run


@dataclass
class Sent:
    """A signal under way, with what was put before it: into which memory, which bytes."""

    depth: int
    puts: list[tuple[Memory, list[Segment]]]


@dataclass
class Rank:
    program: Sequence[Step]
    at: int = 0
    depth: int = 0  # length of the longest chain of messages that it has taken
    memory: dict[Memory, list[Segment]] = field(default_factory=dict)
    states: list[tuple[int, State]] = field(default_factory=list)
    unsent: dict[int, list[tuple[Memory, list[Segment]]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def remember(self) -> None:
        every = [(key, segment) for key, some in self.memory.items() for segment in some]
        self.states.append((self.depth, tuple(every)))


class Run:
    """All ranks, one after another as far as each comes: plans give the same in any order."""

    def __init__(self, group: GroupPlans) -> None:
        self.call = group.call
        self.ranks = [Rank(steps) for steps in group.steps]
        self.under_way: dict[tuple[int, int, str], deque[Sent]] = defaultdict(deque)
        self.transfers: list[Transfer] = []
        self.cuts: set[int] = set()  # places where the message is cut
        for rank, state in enumerate(self.ranks):
            begin, end = input_of(self.call, rank)
            if begin < end:
                segment = Segment(0, end - begin, begin, frozenset([rank]))
                state.memory["input", rank, rank] = [segment]
                self.cuts |= {begin, end}
            begin, end = output_of(self.call, rank)
            self.cuts |= {begin, end}

    def run(self) -> None:
        """Run to the end. Raises ValueError where a plan hangs, or does what it must not."""
        moved = True
        while moved:
            moved = False
            for rank, state in enumerate(self.ranks):
                program = state.program
                while state.at < len(program) and self.step(rank, state, program[state.at]):
                    state.at += 1
                    moved = True
        for rank, state in enumerate(self.ranks):
            if state.at < len(state.program):
                step = state.program[state.at]
                raise ValueError(
                    f"rank {rank} waits for a {step.lane} signal of {step.peer} that never comes"
                )
            state.remember()

    def step(self, rank: int, state: Rank, step: Step) -> bool:
        """Do a step; False: it has to wait."""
        if step.verb == "signal":
            sent = Sent(state.depth + (step.lane == "data"), state.unsent.pop(step.peer, []))
            self.under_way[rank, step.peer, step.lane].append(sent)
            return True
        if step.verb == "wait":
            queue = self.under_way[step.peer, rank, step.lane]
            if not queue:
                return False
            self.take(rank, state, step.peer, queue.popleft())
            return True
        try:
            self.move(rank, state, step)
        except ValueError as error:
            raise ValueError(f"rank {rank}, step {state.at + 1}, {step.verb}: {error}") from None
        return True

    def take(self, rank: int, state: Rank, sender: int, sent: Sent) -> None:
        if sent.depth > state.depth:
            state.remember()
            state.depth = sent.depth
        for memory, segments in sent.puts:
            write(state.memory.setdefault(memory, []), segments)
            for segment in segments:
                high = segment.place + segment.end - segment.begin
                told = (sent.depth, sender, rank, segment.place, high, segment.ranks)
                self.transfers.append(Transfer(*told))

    def move(self, rank: int, state: Rank, step: Step) -> None:
        parts = [self.load(rank, state, source, step.bytes) for source in step.sources]
        result = parts[0] if len(parts) == 1 else added(parts, step.bytes)
        for segment in result:
            self.cuts |= {segment.place, segment.place + segment.end - segment.begin}
        for target in step.targets:
            memory = (target.space, target.rank, target.writer)
            moved = [
                s._replace(begin=s.begin + target.offset, end=s.end + target.offset) for s in result
            ]
            if target.rank == rank:
                write(state.memory.setdefault(memory, []), moved)
            else:
                state.unsent[target.rank].append((memory, moved))

    def load(self, rank: int, state: Rank, source: Operand, size: int) -> list[Segment]:
        owner = self.ranks[source.rank]
        memory = owner.memory.get((source.space, source.rank, source.writer), [])
        result = read(memory, source.offset, size)
        if source.rank != rank:  # a window: it goes from rank to rank when it is read
            for s in result:
                high = s.place + s.end - s.begin
                told = (state.depth, source.rank, rank, s.place, high, s.ranks)
                self.transfers.append(Transfer(*told))
        return result


def read(memory: Sequence[Segment], offset: int, size: int) -> list[Segment]:
    """Return the bytes, counted from `offset`. Raises ValueError where some are not written."""
    result, at = [], offset
    for segment in memory:
        if segment.end <= at or segment.begin >= offset + size:
            continue
        if segment.begin > at:
            break
        end = min(segment.end, offset + size)
        place = segment.place + at - segment.begin
        result.append(Segment(at - offset, end - offset, place, segment.ranks))
        at = end
    if at < offset + size:
        raise ValueError("it reads bytes that nobody has written")
    return result


def write(memory: list[Segment], segments: Sequence[Segment]) -> None:
    """Put segments into a memory in place of what they cover."""
    for new in segments:
        kept = []
        for old in memory:
            if old.end <= new.begin or old.begin >= new.end:
                kept.append(old)
                continue
            if old.begin < new.begin:
                kept.append(old._replace(end=new.begin))
            if old.end > new.end:
                kept.append(Segment(new.end, old.end, old.place + new.end - old.begin, old.ranks))
        memory[:] = sorted([*kept, new])


def added(parts: Sequence[Sequence[Segment]], size: int) -> list[Segment]:
    """Return the sum of operands. Raises ValueError where a rank's input would count twice."""
    cuts = sorted({0, size} | {s.begin for some in parts for s in some})
    result = []
    for begin, end in itertools.pairwise(cuts):
        over = [next(s for s in some if s.begin <= begin < s.end) for some in parts]
        place = over[0].place + begin - over[0].begin
        ranks: frozenset[int] = frozenset()
        for segment in over:
            if segment.place + begin - segment.begin != place:
                raise ValueError("it adds up different parts of the message")
            if twice := ranks & segment.ranks:
                raise ValueError(f"it adds the input of rank {min(twice)} twice")
            ranks |= segment.ranks
        result.append(Segment(begin, end, place, ranks))
    return result


# ---- the result


def story_of(group: GroupPlans) -> Story:
    """Run the plans. Raises ValueError where they hang, or add up what does not belong together."""
    if group.call.name == "barrier":
        raise ValueError(
            "a barrier moves no bytes: `ringcomm plan show barrier --svg` draws its signals"
        )
    run = Run(group)
    run.run()
    cuts = sorted(run.cuts)
    chunks = [pair for pair in itertools.pairwise(cuts) if pair[0] < pair[1]]
    rounds = sorted({transfer.round for transfer in run.transfers})
    return Story(group.call, chunks, run.transfers, [state.states for state in run.ranks], rounds)
