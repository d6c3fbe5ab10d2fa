"""Plans of a group as MSCCL++'s execution plans: what both can say, and a sentence for the rest.

Both have a buffer for the input, the output, and scratch that peers put into. A lane of a pair of
ranks is a channel: "memory" inside a host, "port" between hosts. Each rank is one threadblock, and
it does the rank's steps in order. Lengths are chunks there, and bytes here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

from ringcomm.algorithms.steps import LANES, Operand, Step
from ringcomm.tools.plan.check import length_of
from ringcomm.tools.plan.tables import GroupPlans

NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
}
LETTERS = {"input": "i", "output": "o"}
CHANNELS = ("memory", "port")
ALIGNMENT = 16  # bytes: a chunk is a multiple, as the executor adds up 16 at once
MOST_SOURCES, MOST_CHANNELS, MOST_OPERATIONS = 10, 16, 64  # of its operations and threadblocks
SUM = "~sum"  # a space of this module, after all others: a sum on its way to another rank

Json = dict[str, Any]


# ---- writing


def text_of(group: GroupPlans) -> str:
    """Return the file's text. Raises ValueError where MSCCL++ cannot say what a plan does."""
    shape, programs = group.shape, group.steps()
    if shape.name not in NAMES:
        raise ValueError(f"MSCCL++ has no {shape.name}: it has {', '.join(NAMES)}")
    if len({*shape.shards, *shape.send}) > 1:
        raise ValueError("shards differ in length, and those of MSCCL++ do not: change --bytes")
    writers = [Writer(group, rank, steps) for rank, steps in enumerate(programs)]
    for one in writers:
        one.meet(writers)
    lengths = [length_of(shape, 0, space) for space in LETTERS]
    chunk = gcd(*lengths, *(number for one in writers for number in one.numbers()))
    if not chunk or chunk % ALIGNMENT:
        raise ValueError(
            f"parts have {chunk} bytes, and those of MSCCL++ a multiple of {ALIGNMENT}: "
            "change --bytes"
        )
    head = {
        "name": group.algorithm,
        "collective": NAMES[shape.name],
        "protocol": "Simple",
        "inplace": False,
        "reuse_resources": False,
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": ALIGNMENT,
        "min_message_size": max(lengths),
        "max_message_size": (1 << 64) - 1,
    }
    gpus = [one.gpu(chunk, [length // chunk for length in lengths]) for one in writers]
    return json.dumps({**head, "gpus": gpus}, indent=1) + "\n"


def longest(text: str) -> int:
    """Return the most operations that a threadblock of the written text has."""
    return max(len(one["threadblocks"][0]["ops"]) for one in json.loads(text)["gpus"])


class Writer:
    """What one rank does, and the memory, channels and buffers that it needs for that."""

    def __init__(self, group: GroupPlans, rank: int, steps: Sequence[Step]) -> None:
        self.rank, self.local, self.steps = rank, group.shape.local, steps
        self.links = {(step.peer, LANES.index(step.lane)) for step in steps if step.lane}
        self.used: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
        self.needed = [(step, one) for step in steps for one in (*step.targets, *step.sources)]
        for step in steps:
            for one in step.sources:
                if one.space == "window" and one.rank != rank:
                    raise ValueError(
                        f"rank {rank} reads the window of rank {one.rank}, and here MSCCL++ only "
                        "puts: another --algorithm, or more --hosts"
                    )
            if len(step.sources) > MOST_SOURCES:
                raise ValueError(f"a step has {len(step.sources)} sources: MSCCL++ takes 10")
            if len(step.sources) > 1 and all(one.rank != rank for one in step.targets):
                self.needed.append((step, self.sum()))
        for step, one in self.needed:
            if one.space not in LETTERS:
                self.used[one.space, one.rank, one.writer].append((one.offset, step.bytes))
        self.peers = sorted({key[1] for key in self.used} - {rank})
        self.links |= {(peer, 0) for peer in self.peers}

    def sum(self) -> Operand:
        return Operand(SUM, self.rank, self.rank, 0)

    def kind(self, peer: int) -> str:
        return CHANNELS[peer // self.local != self.rank // self.local]

    def meet(self, writers: Sequence[Writer]) -> None:
        """Have channels to whom has one to this rank, and lay out this rank's scratch.

        That is slots by their writers, one after another, without gaps.
        """
        self.writers = writers
        spans: dict[tuple[bool, int, str], list[tuple[int, int]]] = defaultdict(list)
        for one in writers:
            self.links |= {(one.rank, lane) for peer, lane in one.links if peer == self.rank}
            for (space, owner, writer), used in one.used.items():
                if owner == self.rank:
                    spans[writer == owner, writer, space] += used
        self.slots: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        self.scratch = 0
        for (_, writer, space), used in sorted(spans.items()):
            slots = self.slots[space, writer]
            for start, size in sorted(used):
                begun, end, at = slots[-1] if slots else (start, start - 1, 0)
                if start <= end:
                    slots[-1] = (begun, max(end, start + size), at)
                else:
                    slots.append((start, start + size, self.scratch))
                begun, end, at = slots[-1]
                self.scratch = at + end - begun

    def place(self, one: Operand) -> int:
        """Where it begins in its buffer, in bytes."""
        if one.space in LETTERS:
            return one.offset
        slots = self.writers[one.rank].slots[one.space, one.writer]
        begun, _, at = next(slot for slot in slots if slot[0] <= one.offset < slot[1])
        return one.offset - begun + at

    def numbers(self) -> Iterator[int]:
        """The lengths and offsets of which a chunk is a divisor."""
        yield self.scratch
        for step, one in self.needed:
            yield step.bytes
            yield self.place(one)

    def gpu(self, chunk: int, lengths: list[int]) -> Json:
        self.chunk = chunk
        kinds = [
            kind for kind in CHANNELS if any(self.kind(peer) == kind for peer, _ in self.links)
        ]
        links = {k: [one for one in sorted(self.links) if self.kind(one[0]) == k] for k in kinds}
        peers = {k: [one for one in self.peers if self.kind(one) == k] for k in kinds}
        self.numbered = {key: i for some in links.values() for i, key in enumerate(some)}
        self.buffers = {peer: i for some in peers.values() for i, peer in enumerate(some)}
        if any(len(some) > MOST_CHANNELS for some in links.values()):
            raise ValueError(f"rank {self.rank} needs {len(self.links)} channels: MSCCL++ has 16")
        remote = [(peer, kind) for kind in kinds for peer in peers[kind]]
        uses = {k: [i for i, (_, kind) in enumerate(remote) if kind == k] for k in kinds}
        block = {
            "id": 0,
            "ops": ordered([op for step in self.steps for op in self.operations(step)]),
            "channels": [
                {"channel_type": kind, "channel_ids": [*range(len(links[kind]))]} for kind in kinds
            ],
            "remote_buffer_refs": [
                {"access_channel_type": kind, "remote_buffer_ids": uses[kind]} for kind in kinds
            ],
        }
        return {
            "id": self.rank,
            "input_chunks": lengths[0],
            "output_chunks": lengths[1],
            "scratch_chunks": self.scratch // chunk,
            "channels": [
                {"channel_type": kind, "connected_to": [peer for peer, _ in links[kind]]}
                for kind in kinds
            ],
            "remote_buffers": [
                {"rank": peer, "type": "s", "access_channel_types": [kind]} for peer, kind in remote
            ],
            "semaphores": [],
            "threadblocks": [block],
        }

    def operations(self, step: Step) -> Iterator[Json]:
        if step.lane:
            yield {"name": step.verb, **self.channel(step.peer, LANES.index(step.lane))}
            return
        source, targets = step.sources[0], step.targets
        if len(step.sources) > 1:
            source = next((one for one in targets if one.rank == self.rank), self.sum())
            added = [self.buffer(one, step.bytes) for one in step.sources]
            into = [self.buffer(source, step.bytes)]
            yield {"name": "re", "src_buff": added, "dst_buff": into, "reduce_op": "sum"}
        for one in targets:
            if one == source:
                continue
            ends = {
                "src_buff": [self.buffer(source, step.bytes)],
                "dst_buff": [self.buffer(one, step.bytes)],
            }
            if one.rank == self.rank:
                yield {"name": "copy", **ends}
            else:
                yield {"name": "put", **ends, **self.channel(one.rank, 0)}

    def channel(self, peer: int, lane: int) -> Json:
        return {"channel_ids": [self.numbered[peer, lane]], "channel_type": self.kind(peer)}

    def buffer(self, one: Operand, size: int) -> Json:
        name: Json = {"type": LETTERS.get(one.space, "s")}
        if one.rank != self.rank:
            name = {"buffer_id": self.buffers[one.rank]}
        return {**name, "index": self.place(one) // self.chunk, "size": size // self.chunk}


def ordered(ops: Sequence[Json]) -> list[Json]:
    """Let the threads of the block meet where they must, by `nop`.

    The proxy of a port reads what is put later on. So what is put is flushed before the next step.
    """
    made: list[Json] = []
    moved: list[Json] = []  # by all threads, since they met
    alone = False  # one thread has waited, or flushed, since they met
    fused = False
    for op, after in zip(ops, [*ops[1:], {"name": ""}], strict=True):
        if fused:
            fused = False
            continue
        port = op["name"] == "put" and op["channel_type"] == "port"
        by_all = op["name"] in ("copy", "re", "put") and not port
        if (alone or conflict(op, moved)) if by_all else (moved and op["name"] != "wait"):
            made.append({"name": "nop"})
            moved, alone = [], False
        same = port and after.get("channel_type") == "port"
        same = same and after["channel_ids"] == op["channel_ids"]
        fused = same and after["name"] == "signal"
        made.append({**op, "name": "pwsf"} if fused else op)
        if port and not (same and after["name"] in ("put", "signal")):
            made.append({"name": "flush", "channel_ids": op["channel_ids"], "channel_type": "port"})
        moved += [op] if by_all else []
        alone = alone or port or op["name"] == "wait"
    return made


def conflict(op: Json, before: Sequence[Json]) -> bool:
    """Whether memory that one of them writes is the other's, too."""

    def meet(ones: list[Json], others: list[Json]) -> bool:
        return any(
            one.get("type") == other.get("type") is not None
            and one["index"] < other["index"] + other["size"]
            and other["index"] < one["index"] + one["size"]
            for one in ones
            for other in others
        )

    return any(
        meet(op["dst_buff"], old["dst_buff"] + old["src_buff"])
        or meet(op["src_buff"], old["dst_buff"])
        for old in before
    )
