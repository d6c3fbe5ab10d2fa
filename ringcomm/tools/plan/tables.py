"""A group's plans as data: the tables of csrc/plan/plan.h for each rank, and the shape.

`GroupPlans` is what `ringcomm simulate`, `draw` and `plan --export` take. The planners of the
library make them, or a file (plan_file.py), or a program. Nothing in them changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringcomm.algorithms import steps
from ringcomm.algorithms.steps import Operand, Shape


class Motion(NamedTuple):
    """How an operand moves: on by `bytes` a pass; or in turn through `slots` of so many bytes."""

    bytes: int
    slots: int = 0  # a power of two; 0: straight on
    first: int = 0  # the slot that it begins at
    each_pass: int = 0  # slots further
    each_round: int = 0


class Extent(NamedTuple):
    """A part of input or output, such as a shard, in bytes."""

    offset: int
    bytes: int


class Ref(NamedTuple):
    """An operand. Motion and extent are places in the tables, counted from 1; 0 is none."""

    space: str
    rank: int  # the owner of the memory
    writer: int
    offset: int = 0  # bytes
    motion: int = 0
    extent: int = 0


class Move(NamedTuple):
    """A step. A copy or reduce has `bytes` and operands, a signal or wait `peer` and `lane`."""

    verb: str
    peer: int = -1
    lane: str = ""
    bytes: int = 0  # of each operand
    first_ref: int = 0  # the targets, then the sources
    targets: int = 0
    sources: int = 0
    extent: int = 0  # of the bytes, those before its end are moved
    at: int = 0  # where in the extent they begin
    motion: int = 0  # of `at`
    final: bool = False  # a reduce: the last one of these elements


class Block(NamedTuple):
    """Steps that follow one another, so many rounds."""

    first_step: int
    step_count: int
    rounds: int = 1


class Loop(NamedTuple):
    """Blocks that follow one another, so many passes."""

    first_block: int
    block_count: int
    passes: int = 1


@dataclass(frozen=True)
class Tables:
    """One rank's plan."""

    loops: tuple[Loop, ...] = ()
    blocks: tuple[Block, ...] = ()
    steps: tuple[Move, ...] = ()
    refs: tuple[Ref, ...] = ()
    motions: tuple[Motion, ...] = ()
    extents: tuple[Extent, ...] = ()


@dataclass(frozen=True)
class GroupPlans:
    """The plans of all ranks, by rank."""

    shape: Shape
    algorithm: str
    plans: tuple[Tables, ...]

    def steps(self) -> list[list[steps.Step]]:
        """Return the steps of each rank, one after another, with the passes and rounds of each."""
        return [list(walk(plan)) for plan in self.plans]


def of_library(shape: Shape, algorithm: str | None = None) -> GroupPlans:
    """Return the plans that the library makes; `algorithm` None: by its table.

    The library tells its steps one after another, so each plan is one loop of one pass. Raises
    ValueError where the collective has no such algorithm.
    """
    made = steps.plans_of(shape, algorithm)
    bare = shape._replace(word="", names=[])
    return GroupPlans(bare, made[0].algorithm, tuple(tables_of(one.steps) for one in made))


def tables_of(steps: Sequence[steps.Step]) -> Tables:
    """Return steps as one loop of one pass."""
    refs: list[Ref] = []
    moves: list[Move] = []
    for step in steps:
        operands = [*step.targets, *step.sources]
        counts = (len(step.targets), len(step.sources))
        if step.lane:
            moves.append(Move(step.verb, step.peer, step.lane))
        else:
            moves.append(Move(step.verb, -1, "", step.bytes, len(refs), *counts))
        refs += [Ref(one.space, one.rank, one.writer, one.offset) for one in operands]
    if not moves:
        return Tables()
    return Tables((Loop(0, 1),), (Block(0, len(moves)),), tuple(moves), tuple(refs))


# ---- the same arithmetic as csrc/plan/cursor.h


class Place(NamedTuple):
    """Where in a plan a step is done."""

    step: int
    pass_number: int
    round_number: int


def places(plan: Tables) -> Iterator[Place]:
    """Every step in the order in which it is done, with its pass and round."""
    for loop in plan.loops:
        blocks = plan.blocks[loop.first_block : loop.first_block + loop.block_count]
        for pass_number in range(loop.passes):
            for block in blocks:
                for round_number in range(block.rounds):
                    for step in range(block.first_step, block.first_step + block.step_count):
                        yield Place(step, pass_number, round_number)


def walk(plan: Tables) -> Iterator[steps.Step]:
    """The steps that do something: a copy of nothing, at the end of an extent, is left out."""
    for place in places(plan):
        step = expand(plan, place)
        if step.bytes or step.lane:
            yield step


def expand(plan: Tables, place: Place) -> steps.Step:
    """Return a step with the offsets and bytes of its pass and round."""
    move = plan.steps[place.step]
    if move.lane:
        return steps.Step(move.verb, move.peer, move.lane, 0, [], [])
    refs = plan.refs[move.first_ref : move.first_ref + move.targets + move.sources]
    operands = [
        Operand(ref.space, ref.rank, ref.writer, offset_of(plan, ref, place)) for ref in refs
    ]
    size = bytes_of(plan, move, place)
    split = move.targets
    return steps.Step(move.verb, -1, "", size, operands[:split], operands[split:])


def bytes_of(plan: Tables, move: Move, place: Place) -> int:
    if move.extent == 0:
        return move.bytes
    end = plan.extents[move.extent - 1 + place.round_number].bytes
    at = move.at + moved(plan, move.motion, place)
    return min(move.bytes, end - at) if at < end else 0


def offset_of(plan: Tables, ref: Ref, place: Place) -> int:
    offset = ref.offset + moved(plan, ref.motion, place)
    if ref.extent == 0:
        return offset
    return offset + plan.extents[ref.extent - 1 + place.round_number].offset


def moved(plan: Tables, number: int, place: Place) -> int:
    if number == 0:
        return 0
    motion = plan.motions[number - 1]
    if motion.slots == 0:
        return place.pass_number * motion.bytes
    turns = motion.first + place.pass_number * motion.each_pass
    turns += place.round_number * motion.each_round
    return (turns & (motion.slots - 1)) * motion.bytes
