"""MSCCL++'s execution plans as plans of ringcomm: read as if an enemy had written them.

One threadblock a rank, of `copy`, `put`, `re`, `res`, signals and waits. Scratch that a peer puts
into is an inbox, and scratch of the rank's own a window. Each error names the place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from math import gcd
from typing import Any, NamedTuple

from ringcomm.algorithms.steps import COLLECTIVES, LANES, MOST_RANKS, SHARDED, Operand, Shape, Step
from ringcomm.tools.plan import check
from ringcomm.tools.plan.check import PlaceError
from ringcomm.tools.plan.mscclpp import ALIGNMENT, CHANNELS, NAMES, Json
from ringcomm.tools.plan.tables import GroupPlans, tables_of

MOST = 1 << 40  # of chunks and bytes
BUFFERS = {"i": "input", "o": "output", "s": "scratch"}
IDLE = ("nop", "flush")  # each step of ringcomm is done before the next one
PUTS = ("put", "pws", "pwsf")
SIGNALS = {"signal": "signal", "rlxsignal": "signal", "wait": "wait", "rlxwait": "wait"}


class Part(NamedTuple):
    """Chunks of a rank's buffer, and where the file says so."""

    kind: str
    rank: int
    first: int
    size: int
    place: str


class Draft(NamedTuple):
    """A step whose scratch has no writers yet."""

    verb: str
    peer: int = -1
    lane: str = ""
    targets: tuple[Part, ...] = ()
    sources: tuple[Part, ...] = ()


def is_plan(body: Any) -> bool:
    return isinstance(body, dict) and "gpus" in body and "format" not in body


def parse(body: Json) -> GroupPlans:
    """Return the plans of what JSON says. Raises PlaceError."""
    name, collective = text(body, "name", ""), text(body, "collective", "")
    known = {theirs: ours for ours, theirs in NAMES.items()}
    if collective not in known:
        raise PlaceError("collective", f"it must be one of {', '.join(known)}")
    if text(body, "protocol", "") != "Simple":
        raise PlaceError("protocol", "ringcomm has no packets with flags: it must be Simple")
    gpus = rows(body, "gpus", "")
    if not 1 <= len(gpus) <= MOST_RANKS:
        raise PlaceError("gpus", f"there are {len(gpus)}: a group has 1 to {MOST_RANKS} ranks")
    ranks = [Rank(gpu, rank, len(gpus)) for rank, gpu in enumerate(gpus)]
    collective = known[collective]
    shape = shape_of(body, collective, ranks)
    inplace = value(body, "inplace", "", bool)
    if inplace and collective not in ("all_reduce", "all_gather"):
        raise PlaceError("inplace", f"a {collective} of ringcomm keeps its input")
    moves = [list(rank.drafts(ranks, inplace, collective)) for rank in ranks]
    whole = max(ranks[0].chunks["i"], ranks[0].chunks["o"])
    chunk = (shape.bytes or sum(shape.shards or shape.send)) // whole
    writers = [Writers(rank.rank, moves) for rank in ranks]
    plans = []
    for drafts in moves:
        steps = [step_of(one, writers, chunk) for one in drafts]
        plans.append(tables_of(steps))
    safe = "".join(c if c.isascii() and (c.isalnum() or c in " .:/-_") else "_" for c in name)
    group = GroupPlans(shape, safe[:64] or "mscclpp", tuple(plans))
    check.check(group)
    return group


def shape_of(body: Json, collective: str, ranks: list[Rank]) -> Shape:
    """The message is the smallest that the file is for, and ports lead to other hosts."""
    size, given, made = len(ranks), ranks[0].chunks["i"], ranks[0].chunks["o"]
    for rank in ranks:
        if (rank.chunks["i"], rank.chunks["o"]) != (given, made):
            raise PlaceError(f"gpus[{rank.rank}]", "ranks have different numbers of chunks")
    factor = {"all_gather": (size, 1), "reduce_scatter": (1, size)}.get(collective, (1, 1))
    bad = given * factor[0] != made * factor[1] or (collective == "all_to_all" and given % size)
    if bad or not given or not made:
        raise PlaceError(
            "gpus[0]", f"{given} and {made} chunks are no {collective} of {size} ranks"
        )
    align = value(body, "buffer_alignment", "", int, ALIGNMENT)
    least = value(body, "min_message_size", "", int, 0)
    if not 1 <= align <= 4096:
        raise PlaceError("buffer_alignment", "it must be 1 to 4096")
    whole = max(given, made)
    chunk = max(1, -(-least // (whole * align))) * align
    if chunk * whole > MOST:
        raise PlaceError("min_message_size", f"with {whole} chunks it is more than {MOST} bytes")
    pairs = [(r.rank, peer) for r in ranks for kind, peer in r.links if kind == "memory"]
    local = next(
        d for d in range(1, size + 1)
        if size % d == 0 and all(a // d == b // d for a, b in pairs)
    )  # fmt: skip
    message = chunk * whole
    shards, number = [message // size] * size, COLLECTIVES.index(collective)
    made_of: tuple[int, list[int], list[int]] = (0, shards, [])
    if collective not in SHARDED:
        made_of = (message, [], []) if collective == "all_reduce" else (0, [], shards)
    return Shape(number, size, local, gcd(chunk, 4), 0, *made_of, [], "", [])


class Rank:
    """What the file says of one rank."""

    def __init__(self, gpu: Any, rank: int, size: int) -> None:
        self.rank, self.place = rank, f"gpus[{rank}]"
        if value(gpu, "id", self.place, int) != rank:
            raise PlaceError(f"{self.place}.id", f"it must be {rank}, as ranks are in order")
        self.chunks = {k: value(gpu, f"{BUFFERS[k]}_chunks", self.place, int) for k in BUFFERS}
        found: list[tuple[str, int]] = []
        for where, row in placed(gpu, "channels", self.place):
            kind = kind_of(row, "channel_type", where)
            found += [(kind, peer) for peer in numbers(row, "connected_to", where, size, "ranks")]
        if any(peer == rank for _, peer in found):
            raise PlaceError(f"{self.place}.channels", "a channel leads to its own rank")
        self.links = sorted(found, key=lambda one: CHANNELS.index(one[0]))
        count: Counter[int] = Counter()
        lanes = []
        for kind, peer in self.links:
            lanes.append((kind, peer, count[peer]))
            count[peer] += 1
        buffers = []
        for where, row in placed(gpu, "remote_buffers", self.place):
            given = {"rank": [value(row, "rank", where, int)]}
            (owner,) = numbers(given, "rank", where, size, "ranks")
            buffers.append((owner, letter(row, where), rows(row, "access_channel_types", where)))
        blocks = rows(gpu, "threadblocks", self.place)
        if len(blocks) > 1:
            raise PlaceError(f"{self.place}.threadblocks", "a plan of ringcomm has one at most")
        self.place += ".threadblocks[0]"
        block = blocks[0] if blocks else {"ops": [], "channels": []}
        self.ops = rows(block, "ops", self.place)
        self.lanes: dict[str, list[tuple[str, int, int]]] = {kind: [] for kind in CHANNELS}
        for where, row in placed(block, "channels", self.place):
            kind = kind_of(row, "channel_type", where)
            own = [one for one in lanes if one[0] == kind]
            ids = numbers(row, "channel_ids", where, len(own), f"{kind} channels")
            self.lanes[kind] += [own[i] for i in ids]
        self.buffers: dict[str, list[tuple[int, str]]] = {kind: [] for kind in CHANNELS}
        for where, row in placed(
            {"remote_buffer_refs": [], **block}, "remote_buffer_refs", self.place
        ):
            kind = kind_of(row, "access_channel_type", where)
            ids = numbers(row, "remote_buffer_ids", where, len(buffers), "remote buffers")
            for i in ids:
                if kind not in buffers[i][2]:
                    raise PlaceError(where, f"remote buffer {i} has no access by {kind}")
                self.buffers[kind].append(buffers[i][:2])

    def drafts(self, ranks: list[Rank], inplace: bool, collective: str) -> Iterator[Draft]:
        """The steps; in place, the input is copied to the output, where all else is done."""
        self.ranks, self.moved = ranks, -1  # in place: where the input is in the output
        if inplace:
            count = self.chunks["i"]
            self.moved = self.rank * count if collective == "all_gather" else 0
            ends = [Part(kind, self.rank, at, count, self.place) for kind, at in
                    (("o", self.moved), ("i", 0))]  # fmt: skip
            yield Draft("copy", targets=(ends[0],), sources=(ends[1],))
        for i, op in enumerate(self.ops):
            place = f"{self.place}.ops[{i}]"
            name = text(op, "name", place)
            if "tbg_info" in op:
                raise PlaceError(place, f"{name} is shared by threadblocks, and ringcomm has one")
            if name in SIGNALS:
                yield from self.signals(op, SIGNALS[name], place)
            elif name in ("copy", "re", "res", *PUTS):
                yield from self.moves(op, name, place)
            elif name not in IDLE:
                raise PlaceError(place, f"ringcomm cannot say the operation {name!r}")

    def signals(self, op: Json, verb: str, place: str) -> Iterator[Draft]:
        kind = kind_of(op, "channel_type", place)
        lanes = self.lanes[kind]
        for i in numbers(op, "channel_ids", place, len(lanes), f"{kind} channels"):
            _, peer, lane = lanes[i]
            if lane >= len(LANES):
                raise PlaceError(
                    place, f"ringcomm has {len(LANES)} lanes to a rank, not {lane + 1}"
                )
            yield Draft(verb, peer, LANES[lane])

    def moves(self, op: Json, name: str, place: str) -> Iterator[Draft]:
        sources = [self.part(op, row, where) for where, row in placed(op, "src_buff", place)]
        targets = [self.part(op, row, where) for where, row in placed(op, "dst_buff", place)]
        put, add = name in PUTS, name in ("re", "res")
        if not sources or not targets or (not add and len(sources) != len(targets)):
            raise PlaceError(place, f"{name} has {len(sources)} sources, {len(targets)} targets")
        if len({one.size for one in (*sources, *targets)}) > 1 and not put:
            raise PlaceError(place, "its buffers differ in size")
        if add and text({"reduce_op": "sum", **op}, "reduce_op", place) != "sum":
            raise PlaceError(place, "ringcomm knows no other reduce_op than sum in a plan")
        for one in sources:
            if one.rank != self.rank:
                raise PlaceError(one.place, f"{name} reads memory of rank {one.rank}: use put")
        local = targets if name in ("copy", "re") else [] if put else targets[:1]
        for one in targets:
            if (one.rank == self.rank) != (one in local) or len(local) > 1:
                raise PlaceError(one.place, f"{name} has another kind of target")
            if one.rank != self.rank and one.kind != "s":
                what = f"it puts into the {BUFFERS[one.kind]} of rank {one.rank}"
                raise PlaceError(one.place, f"{what}, and ringcomm into scratch alone")
            if one.kind == "i":
                raise PlaceError(one.place, "it writes to the input")
        if add:
            yield Draft("reduce", targets=(targets[0],), sources=tuple(sources))
            sources, targets = targets[:1] * (len(targets) - 1), targets[1:]
        for source, target in zip(sources, targets, strict=True):
            if source.size != target.size:
                raise PlaceError(target.place, "it is not as long as its source")
            yield Draft("copy", targets=(target,), sources=(source,))
        if name in ("pws", "pwsf"):
            yield from self.signals(op, "signal", place)

    def part(self, op: Json, row: Any, place: str) -> Part:
        index, size = value(row, "index", place, int), value(row, "size", place, int)
        rank = self.rank
        if "buffer_id" in row:
            kind = kind_of(op, "channel_type", place)
            known = self.buffers[kind]
            ids = {"buffer_id": [row["buffer_id"]]}
            rank, which = known[numbers(ids, "buffer_id", place, len(known), "buffers")[0]]
        else:
            which = letter(row, place)
        end, most = index + size, self.ranks[rank].chunks[which]
        if not size or end > most:
            raise PlaceError(
                place, f"it needs {end} chunks of the {BUFFERS[which]}, which has {most}"
            )
        if self.moved >= 0 and which == "i" and rank == self.rank:
            return Part("o", rank, index + self.moved, size, place)
        return Part(which, rank, index, size, place)


class Writers:
    """Which rank writes which chunks of one rank's scratch."""

    def __init__(self, owner: int, moves: list[list[Draft]]) -> None:
        written = sorted(
            (one.first, one.first + one.size, rank, one.place)
            for rank, drafts in enumerate(moves)
            for draft in drafts
            for one in draft.targets
            if one.kind == "s" and one.rank == owner
        )
        self.spans: list[tuple[int, int, int]] = []
        for start, end, rank, place in written:
            begun, until, writer = self.spans[-1] if self.spans else (0, -1, -1)
            if start < until and writer != rank:
                what = (
                    f"chunk {start} of rank {owner}'s scratch has two writers, {writer} and {rank}"
                )
                raise PlaceError(place, what)
            if start <= until and writer == rank:
                self.spans[-1] = (begun, max(until, end), writer)
            else:
                self.spans.append((start, end, rank))

    def of(self, part: Part) -> int:
        at = bisect_right(self.spans, part.first, key=lambda one: one[0]) - 1
        if at < 0 or self.spans[at][1] < part.first + part.size:
            raise PlaceError(part.place, "no rank, or not one alone, writes this scratch")
        return self.spans[at][2]


def step_of(draft: Draft, writers: list[Writers], chunk: int) -> Step:
    def operand(one: Part) -> Operand:
        if one.kind != "s":
            return Operand(BUFFERS[one.kind], one.rank, one.rank, one.first * chunk)
        writer = writers[one.rank].of(one)
        space = "window" if writer == one.rank else "inbox"
        return Operand(space, one.rank, writer, one.first * chunk)

    targets, sources = [*map(operand, draft.targets)], [*map(operand, draft.sources)]
    size = draft.targets[0].size * chunk if draft.targets else 0
    return Step(draft.verb, draft.peer, draft.lane, size, targets, sources)


# ---- values of JSON


def value(given: Any, key: str, place: str, kind: type, default: Any = None) -> Any:
    """Return what is there, of its type; a number is 0 to MOST. Raises PlaceError."""
    if not isinstance(given, dict):
        raise PlaceError(place, "it must be an object")
    where = f"{place}.{key}" if place else key
    if key not in given and default is None:
        raise PlaceError(place or "the file", f"it has no {key}")
    found: Any = given.get(key, default)
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        words = {int: "a whole number", str: "text", bool: "true or false", list: "a list"}
        raise PlaceError(where, f"it must be {words[kind]}")
    number: Any = found
    if kind is int and not 0 <= number <= MOST:
        raise PlaceError(where, f"it must be a whole number from 0 to {MOST}")
    return found


def text(given: Any, key: str, place: str) -> str:
    return str(value(given, key, place, str))


def rows(given: Any, key: str, place: str) -> list[Any]:
    return list(value(given, key, place, list))


def placed(given: Any, key: str, place: str) -> Iterator[tuple[str, Any]]:
    for i, row in enumerate(rows(given, key, place)):
        yield f"{place}.{key}[{i}]", row


def numbers(given: Any, key: str, place: str, below: int, what: str) -> list[int]:
    for one in (found := rows(given, key, place)):
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < below:
            raise PlaceError(f"{place}.{key}", f"there are {below} {what}, and no {one!r}"[:200])
    return found


def kind_of(given: Any, key: str, place: str) -> str:
    if (kind := text(given, key, place)) not in CHANNELS:
        raise PlaceError(f"{place}.{key}", f"ringcomm knows memory and port, not {kind!r}"[:200])
    return kind


def letter(given: Any, place: str) -> str:
    if (found := text(given, "type", place)) not in BUFFERS:
        raise PlaceError(f"{place}.type", f"it must be one of {', '.join(BUFFERS)}")
    return found
