"""Tasks of faults/agent.py that are no rank's: they listen on a wire, and bother who listens."""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from lab.wan import round_trip

HELLO, NONCE, CHALLENGE, PROOF = 88, 32, 72, 32  # bytes, as csrc/net/handshake.cc has them
ETH_P_ALL = 0x0003  # what goes out too
CALM = 0.05  # seconds that an answer is waited for, and its way
KEPT = 64  # strangers of whom nothing is known yet
TLS = b"\x16\x03\x01"  # how the first record begins
WHOLE = 1000  # bytes, in which an encrypted handshake has ended
CLOSED = 2.0  # seconds in which a connection is closed that is not let in

Address = tuple[str, int]


def record(pipe: Connection, ports: tuple[int, int]) -> dict[str, Any]:
    """The words of the first to connect to a port, and to whom; seen on this host's wire."""
    said: dict[tuple[bytes, bytes, int, int], bytearray] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL)) as wire:
        wire.bind(("eth0", ETH_P_ALL))
        pipe.send(("running", None))
        while True:
            if not select.select([wire], [], [], 0.2)[0]:
                if pipe.poll():  # asked to stop, and all that has passed was looked at
                    break
                continue
            packet = wire.recv(65_536)
            if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
                continue
            begin = 4 * (packet[0] & 15)
            here, there = struct.unpack_from("!HH", packet, begin)
            end = struct.unpack_from("!H", packet, 2)[0]
            data = packet[begin + 4 * (packet[begin + 12] >> 4) : end]
            if not ports[0] <= there <= ports[1] or ports[0] <= here <= ports[1]:
                continue
            stream = said.setdefault((packet[12:16], packet[16:20], here, there), bytearray())
            stream += data
            # The Hello alone would be that of an attempt that was given up.
            if len(stream) > (WHOLE if stream.startswith(TLS) else HELLO + PROOF):
                where = socket.inet_ntoa(packet[16:20]), there
                return {"address": where, "said": bytes(stream[: HELLO + 4096])}
    return {}


class Strangers:
    """Connections to `address` by those who are not of the job; `said` is a recorded handshake."""

    def __init__(self, address: Address, said: bytes, seed: int) -> None:
        self.address, self.said = address, said
        self.random = random.Random(seed)
        self.challenged = self.let_in = 0  # who knew that far; who got further than that
        self._held: list[socket.socket] = []
        self._slow: list[socket.socket] = []
        self._spoke = time.monotonic()
        self._numbers = itertools.count()
        kinds: list[Callable[[], None]] = [self.scan, self.silent, self.slow, self.noise]
        kinds.append(self.half_open)
        # Only one backend's words are known well enough to forge and replay them.
        knowing = [self.forged_tls, self.replayed_tls] if said.startswith(TLS) else []
        knowing = knowing or ([self.forged, self.replayed] if said else [])
        self._kinds = [*kinds, *knowing]

    def come(self) -> None:
        """The next of them; those who are slow say a byte each second."""
        self._kinds[next(self._numbers) % len(self._kinds)]()
        if time.monotonic() - self._spoke > 1:
            self._spoke = time.monotonic()
            for stranger in self._slow:
                self._try(stranger, b"r")

    @staticmethod
    def _try(stranger: socket.socket, data: bytes) -> None:
        try:
            stranger.send(data)
        except OSError:  # it has been shown the door
            stranger.close()

    def _connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=5)

    def _hold(self, kept: list[socket.socket]) -> None:
        kept.append(self._connect())
        if len(kept) > 200:
            kept.pop(0).close()

    def scan(self) -> None:
        """A visitor that only looks whether somebody listens, here and a port further."""
        for port in (self.address[1], self.address[1] + 1):
            with socket.socket() as stranger:
                stranger.settimeout(5)
                stranger.connect_ex((self.address[0], port))

    def silent(self) -> None:
        self._hold(self._held)

    def slow(self) -> None:
        self._hold(self._slow)

    def noise(self) -> None:
        with self._connect() as stranger:
            self._try(stranger, self.random.randbytes(self.random.randrange(1, 300)))

    def forged(self) -> None:
        """A Hello of its own in a real rank's name; then it does not know the key."""
        hello = self.said[: HELLO - NONCE] + self.random.randbytes(NONCE)
        self._shake_hands(hello, self.random.randbytes(len(self.said) - HELLO))

    def replayed(self) -> None:
        self._shake_hands(self.said[:HELLO], self.said[HELLO:])

    def _shake_hands(self, hello: bytes, rest: bytes) -> None:
        with self._connect() as stranger:
            stranger.settimeout(CALM + round_trip())
            try:
                stranger.sendall(hello)
                challenge = stranger.recv(CHALLENGE, socket.MSG_WAITALL)
                if len(challenge) < CHALLENGE:
                    return
                self.challenged += 1
                stranger.sendall(rest)
                self.let_in += len(stranger.recv(1))
            except OSError:  # closed with a reset, or not at all
                return

    def forged_tls(self) -> None:
        """One that speaks TLS 1.3, and knows neither a secret nor an authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        said = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(ssl.MemoryBIO(), said).do_handshake()
        self._shake_hands_by_tls(said.read(), self.random.randbytes(100))

    def replayed_tls(self) -> None:
        self._shake_hands_by_tls(self.said, b"")

    def _shake_hands_by_tls(self, hello: bytes, rest: bytes) -> None:
        """Answers cannot be read here: a stranger who is let in is not shown the door."""
        with self._connect() as stranger:
            stranger.settimeout(CLOSED)
            try:
                stranger.sendall(hello)
                self.challenged += bool(stranger.recv(65_536))
                stranger.sendall(rest)
                while stranger.recv(65_536):
                    pass
            except TimeoutError:
                self.let_in += 1
            except OSError:
                return

    def half_open(self) -> None:
        """A SYN of a host that is not there: its answer finds nobody."""
        source = self.address[0].rpartition(".")[0] + f".{self.random.randrange(100, 200)}"
        ends = socket.inet_aton(source) + socket.inet_aton(self.address[0])
        ports = struct.pack("!HH", self.random.randrange(1024, 65_536), self.address[1])
        number = self.random.randbytes(4)
        parts = [ports, number, bytes(4), b"\x50\x02", struct.pack("!H", 64_240)]
        header = b"".join(parts)
        pseudo = ends + struct.pack("!BBH", 0, socket.IPPROTO_TCP, 20)
        words = struct.unpack("!16H", pseudo + header + bytes(4))
        total = sum(words)
        total = (total & 0xFFFF) + (total >> 16)
        total = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
        segment = header + struct.pack("!HH", total, 0)
        words_ = (0x45, 0, 40, 0, 0, 64, socket.IPPROTO_TCP, 0)
        packet = struct.pack("!BBHHHBBH", *words_) + ends + segment
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
            raw.sendto(packet, (self.address[0], 0))


def bother(
    pipe: Connection, addresses: Sequence[Address], said: bytes, pace: float
) -> dict[str, Any]:
    """Strangers to one of the addresses, so many, `pace` a second, until no more are asked for.

    How many came to each and how far they got; who was let in anywhere.
    """
    groups = [Strangers(address, said, seed=1) for address in addresses]
    counts = [0 for _ in groups]
    pipe.send(("running", None))
    while order := pipe.recv():
        whom, number = order
        began = time.monotonic()
        for index in range(number):
            time.sleep(max(0.0, began + index / pace - time.monotonic()))
            groups[whom].come()
            counts[whom] += 1
        pipe.send(("done", time.monotonic()))
    challenged = [group.challenged for group in groups]
    let_in = sum(group.let_in for group in groups)
    return {"count": counts, "challenged": challenged, "let in": let_in}


def listen(pipe: Connection) -> dict[str, Any]:
    """Receive strangers as a rank does, but do no work for it: nothing is checked or computed."""
    with socket.create_server(("", 0), backlog=128) as server, select.epoll() as ready:
        strangers: dict[int, socket.socket] = {}
        for file in (server, pipe):
            ready.register(file, select.EPOLLIN)
        pipe.send(("running", server.getsockname()[1]))
        while True:
            for number, _ in ready.poll():
                if number == pipe.fileno():
                    return {"cpu": time.process_time()}
                if number == server.fileno():
                    stranger = server.accept()[0]
                    strangers[stranger.fileno()] = stranger
                    ready.register(stranger, select.EPOLLIN)
                    if len(strangers) > KEPT:
                        strangers.pop(next(iter(strangers))).close()
                elif number in strangers and not answer(strangers[number]):
                    strangers.pop(number).close()
    return {}


def answer(stranger: socket.socket) -> bool:
    """Whether to go on listening to it: it has said no more yet than a rank might, or Hello."""
    try:
        data = stranger.recv(65_536)
        if len(data) == HELLO or data.startswith(TLS):
            stranger.send(bytes(CHALLENGE))
    except OSError:
        return False
    return 0 < len(data) <= HELLO
