"""Whether plans can be run to their end; not whether they compute the right thing.

Every index is in its table, every byte in memory that is there, and every wait gets its signal.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from ringcomm.algorithms.steps import ROOTED, SHARDED, Operand, Shape, Step
from ringcomm.tools.plan.tables import GroupPlans, Move, Place, Tables, expand, places

MOST_STEPS = 4_000_000  # of all ranks together: what is longer takes minutes to simulate
LINE_BYTES = 112  # csrc/plan/plan.h
REACH = 1 << 40  # bytes of a window or an inbox: none has as many

Lane = tuple[int, int, str]  # sender, receiver, lane


class PlaceError(ValueError):
    """What is wrong, and where: "plans[2].steps[17].peer"."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(f"{place}: {what}")


def check(group: GroupPlans) -> None:
    """Raise PlaceError at the first thing that is wrong."""
    check_shape(group.shape)
    total = 0
    for rank, plan in enumerate(group.plans):
        where = f"plans[{rank}]"
        check_tables(plan, group.shape, rank, where)
        total += count_of(plan)
        if total > MOST_STEPS:
            raise PlaceError(where, f"with it there are more than {MOST_STEPS:,} steps to be done")
    signals: list[list[tuple[str, Lane]]] = []
    for rank, plan in enumerate(group.plans):
        signals.append(list(run_rank(plan, group.shape, rank, f"plans[{rank}]")))
    check_signals(signals)


def check_shape(shape: Shape) -> None:
    """Each collective has its own lengths: a message, shards, or what each rank sends."""
    wanted = {
        "bytes": shape.name in ("all_reduce", "broadcast", "reduce"),
        "shards": shape.name in SHARDED,
        "send": shape.name == "all_to_all",
    }
    for key, needed in wanted.items():
        given = getattr(shape, key)
        if given and not needed:
            raise PlaceError(f"shape.{key}", f"{shape.name} has none")
        if not given and needed and key != "bytes":
            raise PlaceError(f"shape.{key}", f"{shape.name} needs one for each rank")
    if shape.root and shape.name not in ROOTED:
        raise PlaceError("shape.root", f"{shape.name} has none")


def count_of(plan: Tables) -> int:
    """Return how many steps are done."""
    total = 0
    for loop in plan.loops:
        blocks = plan.blocks[loop.first_block : loop.first_block + loop.block_count]
        total += loop.passes * sum(block.step_count * block.rounds for block in blocks)
    return total


# ---- tables


def check_tables(plan: Tables, shape: Shape, rank: int, where: str) -> None:
    for i, loop in enumerate(plan.loops):
        inside(
            loop.first_block, loop.block_count, len(plan.blocks), f"{where}.loops[{i}]", "blocks"
        )
        if not loop.passes >= 1:
            raise PlaceError(f"{where}.loops[{i}].passes", "it must be 1 at least")
    for i, block in enumerate(plan.blocks):
        inside(block.first_step, block.step_count, len(plan.steps), f"{where}.blocks[{i}]", "steps")
        if not block.rounds >= 1:
            raise PlaceError(f"{where}.blocks[{i}].rounds", "it must be 1 at least")
    for i, motion in enumerate(plan.motions):
        if motion.slots & (motion.slots - 1):
            raise PlaceError(f"{where}.motions[{i}].slots", "it must be 0 or a power of two")
    for i, ref in enumerate(plan.refs):
        place = f"{where}.refs[{i}]"
        for key in ("rank", "writer"):
            if not getattr(ref, key) < shape.size:
                raise PlaceError(f"{place}.{key}", f"there are {shape.size} ranks")
        numbered(ref.motion, len(plan.motions), f"{place}.motion", "motions")
        numbered(ref.extent, len(plan.extents), f"{place}.extent", "extents")
    for i, move in enumerate(plan.steps):
        check_move(plan, move, shape, rank, f"{where}.steps[{i}]")


def inside(first: int, count: int, length: int, place: str, what: str) -> None:
    if count < 1 or first + count > length:
        raise PlaceError(
            place, f"it needs {what} {first} to {first + count - 1}, and there are {length}"
        )


def numbered(number: int, length: int, place: str, what: str) -> None:
    if number > length:
        raise PlaceError(place, f"there are {length} {what}")


def check_move(plan: Tables, move: Move, shape: Shape, rank: int, place: str) -> None:
    if move.verb in ("signal", "wait"):
        if not 0 <= move.peer < shape.size or move.peer == rank:
            raise PlaceError(f"{place}.peer", f"it must be another rank, below {shape.size}")
        if not move.lane:
            raise PlaceError(f"{place}.lane", "a signal or wait needs one")
        if move.targets or move.sources or move.bytes:
            raise PlaceError(place, f"a {move.verb} moves no bytes")
        return
    if move.lane or move.peer != -1:
        raise PlaceError(place, f"a {move.verb} has no peer and no lane")
    if move.targets < 1 or move.sources < 1:
        raise PlaceError(place, f"a {move.verb} needs targets and sources")
    if move.verb == "copy" and (move.targets, move.sources) != (1, 1):
        raise PlaceError(place, "a copy has one target and one source")
    inside(move.first_ref, move.targets + move.sources, len(plan.refs), place, "refs")
    numbered(move.motion, len(plan.motions), f"{place}.motion", "motions")
    numbered(move.extent, len(plan.extents), f"{place}.extent", "extents")
    if move.final and move.verb != "reduce":
        raise PlaceError(f"{place}.final", "only a reduce has it")


# ---- the run of a rank


def run_rank(plan: Tables, shape: Shape, rank: int, where: str) -> Iterator[tuple[str, Lane]]:
    """The signals and waits, in order, while every operand is looked at.

    Steps that say the same in every round and pass are looked at once.
    """
    seen: set[int] = set()
    for place in places(plan):
        move = plan.steps[place.step]
        if move.lane:
            ends = (rank, move.peer) if move.verb == "signal" else (move.peer, rank)
            yield move.verb, (*ends, move.lane)
        elif place.step not in seen:
            check_extents(plan, move, place, where)
            step = expand(plan, place)
            check_step(step, shape, rank, f"{where}.steps[{place.step}]")
            if not moves_on(plan, move):
                seen.add(place.step)


def moves_on(plan: Tables, move: Move) -> bool:
    refs = plan.refs[move.first_ref : move.first_ref + move.targets + move.sources]
    return bool(move.motion or move.extent or any(one.motion or one.extent for one in refs))


def check_extents(plan: Tables, move: Move, place: Place, where: str) -> None:
    refs = plan.refs[move.first_ref : move.first_ref + move.targets + move.sources]
    for extent in (move.extent, *(ref.extent for ref in refs)):
        if extent and extent + place.round_number > len(plan.extents):
            text = f"round {place.round_number} needs extent {extent + place.round_number}"
            raise PlaceError(
                f"{where}.steps[{place.step}]", f"{text}, and there are {len(plan.extents)}"
            )


def check_step(step: Step, shape: Shape, rank: int, where: str) -> None:
    for one in step.targets:
        check_operand(one, step.bytes, shape, rank, where)
        if one.space not in ("input", "output") and one.writer != rank:
            raise PlaceError(where, f"rank {rank} writes memory whose writer is rank {one.writer}")
        if one.space == "input":
            raise PlaceError(where, "it writes to the input")
        if one.space == "window" and one.rank != rank:
            raise PlaceError(where, f"rank {rank} writes to the window of rank {one.rank}")
    for one in step.sources:
        check_operand(one, step.bytes, shape, rank, where)
        if one.space in ("inbox", "line") and one.rank != rank:
            raise PlaceError(where, f"rank {rank} reads an inbox of rank {one.rank}")
        if one.space == "window" and one.rank // shape.local != rank // shape.local:
            raise PlaceError(
                where, f"rank {rank} reads the window of rank {one.rank} of another host"
            )
    elsewhere = {one.rank for one in step.targets if one.rank != rank}
    if len(elsewhere) > 1:
        raise PlaceError(
            where, f"it writes to several ranks: {', '.join(map(str, sorted(elsewhere)))}"
        )


def check_operand(one: Operand, size: int, shape: Shape, rank: int, where: str) -> None:
    end = one.offset + size
    if one.space in ("input", "output"):
        if one.rank != rank:
            raise PlaceError(
                where, f"the {one.space} of rank {one.rank} is out of reach for rank {rank}"
            )
        most = length_of(shape, rank, one.space)
    elif one.space == "line":
        most = LINE_BYTES
    else:
        most = REACH
    if end > most:
        raise PlaceError(where, f"it needs {end} bytes of the {one.space}, which has {most}")


def length_of(shape: Shape, rank: int, space: str) -> int:
    """Return the bytes of a rank's input or output."""
    name, mine = shape.name, space == "input"
    whole = sum(shape.shards)
    if name == "all_to_all":
        received = sum(shape.recv) if shape.recv else shape.send[rank] * shape.size
        return sum(shape.send) if mine else received
    if name not in SHARDED:
        return shape.bytes
    shard = shape.shards[rank]
    if name in ("reduce_scatter", "scatter"):
        return whole if mine else shard
    return shard if mine else whole


# ---- signals


def check_signals(told: list[list[tuple[str, Lane]]]) -> None:
    """Every wait gets its signal, and no signal is left over."""
    arrived: Counter[Lane] = Counter()
    at = [0] * len(told)
    waiting: dict[Lane, int] = {}
    ready = deque(range(len(told)))
    while ready:
        rank = ready.popleft()
        own = told[rank]
        while at[rank] < len(own):
            verb, lane = own[at[rank]]
            if verb == "signal":
                arrived[lane] += 1
                if (other := waiting.pop(lane, None)) is not None:
                    ready.append(other)
            elif arrived[lane]:
                arrived[lane] -= 1
            else:
                waiting[lane] = rank
                break
            at[rank] += 1
    for (sender, receiver, name), rank in waiting.items():
        text = f"rank {receiver} waits for a {name} signal of rank {sender} that never comes"
        raise PlaceError(f"plans[{rank}]", text)
    for (sender, receiver, name), left in arrived.items():
        if left:
            text = f"rank {receiver} takes {left} too few of its {name} signals"
            raise PlaceError(f"plans[{sender}]", text)
