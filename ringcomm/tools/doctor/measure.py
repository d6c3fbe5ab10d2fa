"""Latency, bandwidth, path MTU and clock offset of every pair; turns.py says which comes when.

The figures are those of this program, over the same memory and network that ringcomm uses. They
show which pairs differ, and are no measure of ringcomm's own speed.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from dataclasses import asdict, dataclass
from typing import Any

from ringcomm.tools.doctor import facts
from ringcomm.tools.doctor.probe import WINDOW

REQUEST = struct.Struct("!cI")  # what, bytes
ANSWER = struct.Struct("!d")  # the wall clock
PING, SEND, FETCH, WRITE, READ, END = b"P", b"S", b"F", b"W", b"R", b"E"
PINGS = 20
SMALLEST_BURST, GROWTH = 64 << 10, 8
CHUNK = 256 << 10
STALL = 1.5  # seconds without an end of the smallest burst
BURSTS = 5  # that last, of which the fastest counts: what disturbs a burst makes it slower

TCP_INFO = struct.Struct("=8B24I")
SEND_MSS, PATH_MTU, RETRANSMITS = 8 + 2, 8 + 13, 8 + 23


@dataclass
class Pair:
    """The figures of two ranks, the first of which asked.

    Seconds, bytes a second and bytes; 0 where it was not measured.
    """

    ranks: tuple[int, int]
    latency: float = 0.0  # half of the median round trip
    forth: float = 0.0  # bandwidth from the first to the second rank
    back: float = 0.0
    offset: float = 0.0  # the second's clock is so far ahead
    round_trip: float = 0.0  # the shortest: how far `offset` may be wrong
    mtu: int = 0
    retransmits: int = 0
    local: str = ""  # the first's address of the connection
    remote: str = ""
    trouble: str = ""  # "stalled forth", "stalled back", or an error

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(told: dict[str, Any]) -> Pair:
        return Pair(**{**facts.known(Pair, told), "ranks": tuple(told["ranks"])})


def receive(lane: socket.socket, count: int, end: float) -> None:
    """Read so many bytes and forget them. Raises OSError, TimeoutError after `end`."""
    buffer = memoryview(bytearray(min(count, CHUNK)))
    while count > 0:
        lane.settimeout(max(0.001, end - time.monotonic()))
        got = lane.recv_into(buffer[: min(count, len(buffer))])
        if got == 0:
            raise ConnectionResetError("closed by the peer")
        count -= got


def read(lane: socket.socket, count: int, end: float) -> bytes:
    parts = b""
    while len(parts) < count:
        lane.settimeout(max(0.001, end - time.monotonic()))
        part = lane.recv(count - len(parts))
        if not part:
            raise ConnectionResetError("closed by the peer")
        parts += part
    return parts


def send(lane: socket.socket, data: bytes | memoryview, end: float) -> None:
    lane.settimeout(max(0.001, end - time.monotonic()))
    lane.sendall(data)


# ---- the side that answers


def serve(lane: socket.socket, window: Any, end: float) -> None:
    """Answer until the other side ends. Raises OSError. `window`: its memory, None over TCP."""
    scratch = bytearray(WINDOW) if window is not None else bytearray()
    while True:
        what, count = REQUEST.unpack(read(lane, REQUEST.size, end))
        count = min(count, 64 << 20)
        if what == END:
            return
        if what == SEND:
            receive(lane, count, end)
        elif what == FETCH:
            send_zeros(lane, count, end)
        elif what == READ and window is not None:
            scratch[:count] = window[:count]
        elif what == WRITE and window is not None:
            window[:count] = scratch[:count]
        send(lane, ANSWER.pack(time.time()), end)


def send_zeros(lane: socket.socket, count: int, end: float) -> None:
    zeros = memoryview(bytes(min(count, CHUNK)))
    while count > 0:
        send(lane, zeros[: min(count, len(zeros))], end)
        count -= min(count, len(zeros))


# ---- the side that asks


class Asker:
    """Measures one pair, over a connection, or the memory that both map (`window`)."""

    def __init__(self, lane: socket.socket, pair: Pair, window: Any) -> None:
        self.lane, self.pair, self.window = lane, pair, window
        self.scratch = bytearray(WINDOW) if window is not None else bytearray()

    def run(self, end: float, burst_seconds: float) -> bool:
        """Fill in the pair, its failures included. False: there was no time to begin."""
        doing = ""
        try:
            self.ask(PING, 0, end)  # the peer may have pairs to measure before
        except TimeoutError:
            return False
        except OSError as error:
            self.pair.trouble = error.strerror or str(error)
            return True
        try:
            if self.window is None:
                self.pair.local = str(self.lane.getsockname()[0])
                self.pair.remote = str(self.lane.getpeername()[0])
            self.ping(end)
            doing = "forth"
            what = SEND if self.window is None else READ
            self.pair.forth = self.rate(what, end, burst_seconds)
            doing = "back"
            what = FETCH if self.window is None else WRITE
            self.pair.back = self.rate(what, end, burst_seconds)
            send(self.lane, REQUEST.pack(END, 0), end)
        except TimeoutError:
            pinged = bool(self.pair.latency) and self.window is None
            self.pair.trouble = f"stalled {doing}" if pinged and doing else "no answer in time"
        except OSError as error:
            self.pair.trouble = error.strerror or str(error)
        self.look_at_socket()
        if self.pair.trouble and self.window is None:
            # A reset is small, and reaches the peer where the bytes before it do not.
            with contextlib.suppress(OSError):
                hard = struct.pack("ii", 1, 0)
                self.lane.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hard)
        return True

    def ask(self, what: bytes, count: int, end: float) -> float:
        """Make one request. Returns the peer's wall clock."""
        send(self.lane, REQUEST.pack(what, count), end)
        if what == SEND:
            send_zeros(self.lane, count, end)
        elif what == FETCH:
            receive(self.lane, count, end)
        return float(ANSWER.unpack(read(self.lane, ANSWER.size, end))[0])

    def ping(self, end: float) -> None:
        times, best = [], 1e9
        for _ in range(PINGS):
            wall, began = time.time(), time.monotonic()
            theirs = self.ask(PING, 0, min(end, began + STALL))
            took = time.monotonic() - began
            times.append(took)
            if took < best:
                best, self.pair.offset = took, theirs - (wall + took / 2)
            if sum(times) > 0.2:
                break
        self.pair.latency, self.pair.round_trip = statistics.median(times) / 2, best

    def rate(self, what: bytes, end: float, seconds: float) -> float:
        """Return bytes a second of a burst that grows until it lasts `seconds`."""
        count, best, lasting, started = SMALLEST_BURST, 0.0, 0, time.monotonic()
        while True:
            began = time.monotonic()
            if what == READ:
                self.window[:count] = self.scratch[:count]
            self.ask(what, count, min(end, began + max(STALL, 20 * seconds)))
            if what == WRITE:
                self.scratch[:count] = self.window[:count]
            took = time.monotonic() - began
            if took >= seconds / 2 or count * 2 > WINDOW:
                best = max(best, count / max(took - self.pair.round_trip, took / 10))
                lasting += 1
                if lasting == BURSTS or time.monotonic() - started > 20 * seconds:
                    return best
                continue
            growth = min(GROWTH, max(2, int(seconds / took)))
            count = min(count * growth, WINDOW)

    def look_at_socket(self) -> None:
        if self.window is not None:
            return
        with contextlib.suppress(OSError, struct.error):
            raw = self.lane.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
            told = TCP_INFO.unpack(raw)
            self.pair.mtu, self.pair.retransmits = told[PATH_MTU], told[RETRANSMITS]
