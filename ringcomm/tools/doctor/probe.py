"""Connections between the ranks: to every address of every peer, in both directions.

A connection counts once the peer has answered the greeting: the listener at an address may
be another process, or another host that has the same address.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import mmap
import os
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ringcomm._runtime.addresses import family
from ringcomm.tools.doctor.endpoints import split
from ringcomm.tools.doctor.meeting import answer_of

GREETING = struct.Struct("!8sIIi16s32s")  # magic, from, to, address, random, proof
MAGIC = b"rcdoctor"
REPLY = struct.Struct("!8s32s")
NO_ADDRESS = -1  # in a greeting over a Unix socket
SPARE_DESCRIPTORS = 32  # are left to the rest of the process
MOST_AT_ONCE = 256
CLOSED_PORT = 9  # discard: it has no listener, so a host that can be reached refuses
WINDOW = 4 << 20  # bytes of memory that each rank shares

CONNECTED, REFUSED, DROPPED = "connected", "refused", "timed out"
SILENT, STRANGER, OTHER_SECRET = "no answer", "another process", "another secret"


@dataclass
class Reachability:
    """The way from one rank to another: the answer of each address."""

    answers: dict[str, str] = field(default_factory=dict)
    chosen: int = -1  # the address over which they talk; -1: none
    memory: str = ""  # why no memory can be shared, or "shared"; "": not tried

    @property
    def reaches(self) -> bool:
        return self.chosen >= 0


@dataclass
class Keys:
    """Proves that two processes are ranks of this run, and have one secret."""

    token: str
    secret: bytes

    def proof(self, *parts: bytes) -> bytes:
        key = hashlib.sha256(self.token.encode() + self.secret).digest()
        return hmac.new(key, b"|".join(parts), hashlib.sha256).digest()

    def public(self, *parts: bytes) -> bytes:
        """Return the same without the secret: it shows that only the secrets differ."""
        return Keys(self.token, b"").proof(*parts)


def greeting(keys: Keys, rank: int, peer: int, address: int) -> bytes:
    nonce = os.urandom(16)
    head = struct.pack("!IIi", rank, peer, address)
    return GREETING.pack(MAGIC, rank, peer, address, nonce, keys.public(b"greeting", head, nonce))


def reply(keys: Keys, greeted: bytes) -> bytes:
    return REPLY.pack(MAGIC, keys.proof(b"reply", greeted))


def judge(keys: Keys, greeted: bytes, answer: bytes) -> str:
    """Return what the peer's answer to our greeting means."""
    if len(answer) < REPLY.size or not answer.startswith(MAGIC):
        return STRANGER
    proof = REPLY.unpack(answer)[1]
    return CONNECTED if hmac.compare_digest(proof, keys.proof(b"reply", greeted)) else OTHER_SECRET


class Acceptor(threading.Thread):
    """Accepts the peers' connections and answers their greetings, until it is closed.

    `taken` is by rank and address: the sockets over which the peer may go on. Strangers are closed.
    """

    def __init__(self, rank: int, keys: Keys, listeners: list[socket.socket]) -> None:
        super().__init__(daemon=True)
        self.taken: dict[tuple[int, int], socket.socket] = {}
        self.windows: dict[int, int] = {}  # descriptors of peers' memory, by rank
        self._rank, self._keys, self._stop = rank, keys, False
        self._selector = selectors.DefaultSelector()
        self._heard: dict[socket.socket, bytes] = {}
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ, True)

    def run(self) -> None:
        while not self._stop:
            for key, _ in self._selector.select(0.05):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if key.data:
                    self._accept(ready)
                else:
                    self._hear(ready)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.02)  # it stays readable
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._heard[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ, False)

    def _hear(self, connection: socket.socket) -> None:
        memory: list[int] = []
        try:
            wanted = GREETING.size - len(self._heard[connection])
            if connection.family == socket.AF_UNIX:
                data, memory, _, _ = socket.recv_fds(connection, wanted, 1)
            else:
                data = connection.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        heard = self._heard[connection] = self._heard[connection] + data
        if data and len(heard) < GREETING.size:
            return
        self._selector.unregister(connection)
        del self._heard[connection]
        if not self._welcome(connection, heard, memory):
            connection.close()
            for descriptor in memory:
                os.close(descriptor)

    def _welcome(self, connection: socket.socket, heard: bytes, memory: list[int]) -> bool:
        if len(heard) < GREETING.size:
            return False
        magic, peer, to, address, nonce, proof = GREETING.unpack(heard)
        head = struct.pack("!IIi", peer, to, address)
        ours = self._keys.public(b"greeting", head, nonce)
        if magic != MAGIC or to != self._rank or not hmac.compare_digest(proof, ours):
            return False
        with contextlib.suppress(OSError):
            connection.send(reply(self._keys, heard))
            if memory:
                self.windows[peer] = memory[0]
            self.taken[peer, address] = connection
            return True
        return False

    def close(self) -> None:
        self._stop = True
        self.join(1)


# ---- connecting


@dataclass
class Attempt:
    """One connection that is being made."""

    peer: int
    index: int  # the number of the peer's address
    address: str
    answer: str = DROPPED
    socket: socket.socket | None = None
    greeted: bytes = b""
    began: float = 0.0
    seconds: float = 0.0

    def end(self, answer: str) -> None:
        self.answer, self.seconds = answer, time.monotonic() - self.began
        if answer != CONNECTED and self.socket is not None:
            self.socket.close()
            self.socket = None


def room() -> int:
    """Return how many connections may be made at once with the descriptors that are left."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  with no descriptor to spare
    except OSError:
        return 1
    return max(1, min(MOST_AT_ONCE, soft - used - SPARE_DESCRIPTORS))


class Connector:
    """Makes connections side by side, each until it is answered or the time is over."""

    def __init__(self, rank: int, keys: Keys) -> None:
        self._rank, self._keys = rank, keys
        self._selector = selectors.DefaultSelector()

    def run(self, attempts: list[Attempt], seconds: float) -> None:
        """Fill in the answers; peers below 0 are not greeted: their host is only asked."""
        end, waiting, under_way = time.monotonic() + seconds, list(attempts), 0
        most = room()
        turns = -(-len(attempts) // most)
        while (waiting or under_way) and time.monotonic() < end:
            while waiting and under_way < most:
                under_way += self._begin(waiting.pop(0))
            for key, events in self._selector.select(0.02):
                under_way -= self._go_on(key.data, events)
            under_way -= self._give_up(seconds / turns)
        for key in list(self._selector.get_map().values()):
            self._finish(key.data, SILENT if key.data.greeted else DROPPED)

    def _begin(self, attempt: Attempt) -> int:
        host, port = split(attempt.address)
        attempt.began = time.monotonic()
        try:
            attempt.socket = socket.socket(family(host), socket.SOCK_STREAM)
            attempt.socket.setblocking(False)
            attempt.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = attempt.socket.connect_ex((host, port))
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS):
            attempt.end(answer_of(code))
            return 0
        assert attempt.socket is not None
        self._selector.register(attempt.socket, selectors.EVENT_WRITE, attempt)
        return 1

    def _go_on(self, attempt: Attempt, events: int) -> int:
        """Return 1 when the attempt has ended."""
        assert attempt.socket is not None
        if events & selectors.EVENT_WRITE:
            code = attempt.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code or attempt.peer < 0:
                return self._finish(attempt, answer_of(code))
            attempt.greeted = greeting(self._keys, self._rank, attempt.peer, attempt.index)
            try:
                attempt.socket.send(attempt.greeted)
            except OSError as error:  # it was reset just now
                return self._finish(attempt, answer_of(error.errno or errno.EIO))
            self._selector.modify(attempt.socket, selectors.EVENT_READ, attempt)
            return 0
        try:
            answer = attempt.socket.recv(REPLY.size)  # it comes in one piece
        except OSError:
            answer = b""
        return self._finish(attempt, judge(self._keys, attempt.greeted, answer))

    def _finish(self, attempt: Attempt, answer: str) -> int:
        assert attempt.socket is not None
        self._selector.unregister(attempt.socket)
        attempt.end(answer)
        return 1

    def _give_up(self, seconds: float) -> int:
        now = time.monotonic()
        late = [
            key.data for key in self._selector.get_map().values() if now - key.data.began > seconds
        ]
        return sum(
            self._finish(attempt, SILENT if attempt.greeted else DROPPED) for attempt in late
        )


# ---- memory that is shared


class Window:
    """Memory of this rank, which peers of its host map: a sealed memfd, as ringcomm makes it."""

    def __init__(self) -> None:
        self.memory = os.memfd_create("ringcomm-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.memory, WINDOW)
        fcntl.fcntl(self.memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.map = mmap.mmap(self.memory, WINDOW, mmap.MAP_SHARED | mmap.MAP_POPULATE)


def listen_unix() -> socket.socket:
    """Listen on an abstract address that the kernel chooses."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("")
    listener.listen(256)
    listener.setblocking(False)
    return listener


def share_memory(
    keys: Keys, rank: int, peer: int, name: str, window: Window
) -> tuple[socket.socket | None, str]:
    """Hand this rank's memory to a peer of its host. Returns the socket, and why there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(2)
        connection.connect(b"\0" + bytes.fromhex(name))
        greeted = greeting(keys, rank, peer, NO_ADDRESS)
        socket.send_fds(connection, [greeted], [window.memory])
        answer = judge(keys, greeted, connection.recv(REPLY.size))
    except OSError as error:
        connection.close()
        return None, error.strerror or str(error)
    if answer != CONNECTED:
        connection.close()
        return None, answer
    return connection, ""


def map_window(memory: int) -> Any:
    """Map a peer's memory. Raises OSError."""
    try:
        return mmap.mmap(memory, WINDOW, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(memory)
