"""Flight records of jobs that never ran: ring files, as ranks would have left them."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm._flight.processes import Process, written
from ringcomm._flight.records import (
    LEFT_AT,
    MAGIC,
    MOMENTS,
    MOMENTS_AT,
    NOBODY,
    RECORD,
    SEEN_AT,
    STATES,
    TOTALS,
)

COLLECTIVES = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "scatter"]
COLLECTIVES += ["gather", "all_to_all", "barrier", "send", "recv"]
DTYPES = ["bool", "uint8", "int64", "float32", "bfloat16"]
OPS = ["SUM", "AVG", "MAX"]
ALGORITHMS = ["direct", "ring", "tree", "a kernel", "a CUDA graph"]
STEP = 128
BEGIN = 1_700_000_000_000_000_000  # wall time, ns
MS = 1_000_000
TICKS = 3  # a nanosecond


def ticks(ns: int) -> int:
    """Return what a processor of 3 GHz counts."""
    return TICKS * ns + 12_345


@dataclass
class Clock:
    """The clocks of a host: its steady one when the job began, and the error of its wall clock.

    Nanoseconds.
    """

    host: str = "a"
    steady: int = 50_000 * MS
    error: int = 0


@dataclass
class Flight:
    """The record of one rank in one group; times are ns since the job began."""

    rank: int  # in the group
    ranks: list[int]  # global
    clock: Clock = field(default_factory=Clock)
    group: str = "0"
    job: str = "train/0"
    failure: str = ""
    capacity: int = 64
    made: int = 0
    pid: int = 0
    meeting: int = 0
    header: dict[str, Any] = field(default_factory=dict)  # instead of the usual
    process: Process | None = None  # as newer records have it
    seen: int | None = None  # when the process lived for sure; ns since the job began
    left: bool = False
    operations: list[tuple[Any, ...]] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)
    sequence: int = 0

    def call(
        self,
        collective: str,
        called: int,
        ended: int | None = None,
        *,
        state: str | None = None,
        elements: int = 1000,
        dtype: str = "float32",
        op: str | None = None,
        root: int | None = None,
        tag: int = 0,
        **facts: int,
    ) -> None:
        """Record a call. `facts`: began, sent, waited, longest, peer, resent, line."""
        message = collective in ("send", "recv")
        self.sequence += not message
        reduces = collective in ("all_reduce", "reduce_scatter", "reduce")
        chosen = OPS.index(op or "SUM") if reduces else 0xFF
        kind = COLLECTIVES.index(collective) | DTYPES.index(dtype) << 8 | chosen << 16
        kind |= (NOBODY if root is None else root) << 24
        state = state or ("running" if ended is None else "done")
        began = facts.get("began", None if state == "queued" else called + MS // 100)
        times = [
            0 if ns is None else ticks(ns + self.clock.steady) for ns in (called, began, ended)
        ]
        waited = facts.get("waited", 0)
        peer, longest = facts.get("peer", -1), facts.get("longest", waited)
        if peer >= 0:
            self.waits[peer] = self.waits.get(peer, 0) + waited
        words = (kind, elements, tag, 0, 1, 0)
        head = (len(self.operations) + 1, 0 if message else self.sequence, *words, *times)
        rest = (facts.get("sent", 0), waited, longest, peer, facts.get("resent", 0))
        self.operations.append((*head, *rest, STATES.index(state), facts.get("line", 0)))

    def data(self) -> bytes:
        """Return the ring file."""
        size, begun = len(self.ranks), len(self.operations)
        records_at = 4096 + (4 * size + 63) // 64 * 64
        totals_at = records_at + self.capacity * STEP
        waits_at = totals_at + len(COLLECTIVES) * TOTALS.size
        header = {
            "version": 2, "job": self.job, "pid": self.pid or 1000 + self.ranks[self.rank],
            "host": self.clock.host, "rank": self.rank, "size": size, "ranks_at": 4096,
            "group": self.group, "meeting": self.meeting, "device": False,
            "capacity": self.capacity, "record_bytes": STEP, "records_at": records_at,
            "totals_at": totals_at, "waits_at": waits_at,
            "collectives": COLLECTIVES, "dtypes": DTYPES, "ops": OPS, "algorithms": ALGORITHMS,
            "ringcomm": "0.1.0", "torch": "2.13.0", **self.header,
        }  # fmt: skip
        data = bytearray(waits_at + 8 * size)
        data[:8] = MAGIC
        clocks = (begun, self.made + self.clock.steady, BEGIN + self.made + self.clock.error)
        for at, number in zip((8, 16, 24), clocks, strict=True):
            data[at : at + 8] = number.to_bytes(8, "little", signed=True)
        then, now = self.clock.steady - MS, self.clock.steady + self.made + MS
        MOMENTS.pack_into(data, MOMENTS_AT, ticks(then), then, ticks(now), now)
        struct.pack_into(f"<{size}i", data, 4096, *self.ranks)
        text = json.dumps(header).encode()
        data[64 : 64 + len(text)] = text
        failure = self.failure.encode()[:1023]
        data[3072 : 3072 + len(failure)] = failure
        for operation in self.operations[-self.capacity :]:
            RECORD.pack_into(
                data, records_at + (operation[0] - 1) % self.capacity * STEP, *operation
            )
        for number, total in enumerate(self.totals()):
            TOTALS.pack_into(data, totals_at + number * TOTALS.size, *total)
        for peer, waited in self.waits.items():
            data[waits_at + 8 * peer : waits_at + 8 * peer + 8] = waited.to_bytes(8, "little")
        if self.seen is not None:
            data[SEEN_AT : SEEN_AT + 8] = (BEGIN + self.seen + self.clock.error).to_bytes(
                8, "little"
            )
        data[LEFT_AT] = self.left
        return bytes(data) + (written(self.process) if self.process else b"")

    def totals(self) -> list[tuple[int, int, int]]:
        """Return operations, bytes and ns of each collective that has ended."""
        sums = [(0, 0, 0) for _ in COLLECTIVES]
        for operation in self.operations:
            kind, elements, called, ended = (operation[i] for i in (2, 3, 8, 10))
            if STATES[operation[-2]] == "done":
                count, size, ns = sums[kind & 0xFF]
                sums[kind & 0xFF] = (count + 1, size + 4 * elements, ns + ended - called)
        return sums

    def name(self, number: int = 0) -> str:
        rank = self.ranks[self.rank]
        return f"rank{rank}-{self.pid or 1000 + rank}-{self.group}{number}.ring"


def write(folder: Path, flights: list[Flight]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, flight in enumerate(flights):
        (folder / flight.name(number)).write_bytes(flight.data())
    return folder


def together(
    flights: list[Flight], collective: str, calls: list[int], moving: int = MS, **facts: Any
) -> int:
    """Record a collective that all of them call, at these times; return when it ended.

    It moves its bytes for `moving` ns once the last rank has called it. The ranks end one after
    the other, a microsecond apart.
    """
    last = max(calls)
    for i, (flight, called) in enumerate(zip(flights, calls, strict=True)):
        late = last - called
        peer = calls.index(last) if late else -1
        waits: dict[str, Any] = {"waited": late, "peer": peer} if late else {}
        flight.call(collective, called, last + moving + 1000 * i, **waits, **facts)
    return last + moving + 1000 * len(flights)


def training(
    size: int,
    steps: int = 20,
    hosts: int = 1,
    slow: int | None = None,
    capacity: int = 64,
    slow_host: str = "",
) -> tuple[list[Flight], int]:
    """Record steps of 10 ms and an all_reduce each; return the records, and when the last ended.

    `slow`: this rank computes 5 ms longer; `slow_host`: each rank of this host does.
    Each host has its own clocks, seconds apart.
    """
    clocks = [
        Clock(f"node{host}", 50_000 * MS * (host + 1), 2_500 * MS * host) for host in range(hosts)
    ]
    ranks = list(range(size))
    flights = [
        Flight(rank, ranks, clocks[rank * hosts // size], capacity=capacity) for rank in ranks
    ]
    late = [
        5 * MS * (rank == slow or flight.clock.host == slow_host)
        for rank, flight in enumerate(flights)
    ]
    now = 0
    for step in range(steps):
        # A little different for each rank and step, and each rank the last one sometimes.
        spread = [(rank * 7 + step * 3) % size * MS // 20 for rank in ranks]
        calls = [now + 10 * MS + spread[rank] + late[rank] for rank in ranks]
        now = together(flights, "all_reduce", calls, 3 * MS, elements=500_000)
    return flights, now
