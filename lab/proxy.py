"""A TCP proxy that does harm to order: on every machine, without root, the same each time.

    with Proxy(("127.0.0.1", port), up=[Way(reset_after=1000)]) as proxy:
        ...  # connect to proxy.address: the first connection is reset, later ones are not

What happens depends on the bytes that pass, not on the clock, so a sweep over offsets meets every
place of a protocol. `seed` decides what is left open: the sizes of pieces and which bit is flipped.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import functools
import random
import socket
import struct
import termios
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST = 64 << 10  # bytes taken at a time
UNSENT = 64  # pieces that may wait for their delay
RESET = struct.pack("ii", 1, 0)  # SO_LINGER without patience: close sends a reset


@dataclass(frozen=True)
class Way:
    """Faults in one direction of one connection; offsets are those of its bytes."""

    delay: float = 0.0  # seconds each piece is under way; it limits no throughput
    pieces: int = 0  # forward in pieces of at most so many bytes; 0: as they come
    flip_at: int | None = None  # one bit of this byte arrives changed
    pause_at: int | None = None  # before this byte, nothing moves for `pause` seconds
    pause: float = 0.0
    reset_after: int | None = None  # after so many bytes, both ends get a reset


class _Reset(Exception):  # noqa: N818  no error: it was ordered
    pass


class Proxy:
    """Forwards connections to `target`; the k-th behaves as `up[k]` and `down[k]` say.

    `up` is from the client to the target. Connections after the last of the list behave well.
    """

    def __init__(
        self,
        target: tuple[str, int],
        up: Sequence[Way] = (),
        down: Sequence[Way] = (),
        seed: int = 0,
    ) -> None:
        self.target, self.seed = target, seed
        self._ways = (up, down)
        self.connections = 0  # so many have come
        family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        self._listener = socket.create_server((target[0], 0), family=family)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()  # not set: paused
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def __enter__(self) -> Proxy:
        self._main = self._loop.create_task(self._accept())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def reset(self) -> None:
        """Reset all connections there are, now."""
        self._call(self._reset)

    def pause(self) -> None:
        """Forward nothing, in no direction of any connection, until `resume`."""
        self._call(self._open.clear)

    def resume(self) -> None:
        self._call(self._open.set)

    def _call(self, function: Callable[[], object]) -> None:
        done = threading.Event()

        def call() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(call)
        done.wait()

    def _reset(self) -> None:
        for task in set(self._tasks):
            task.cancel()

    def _run(self) -> None:
        self._open.set()
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._listener.close()
        self._loop.close()

    async def _accept(self) -> None:
        try:
            while True:
                client, _ = await self._loop.sock_accept(self._listener)
                task = self._loop.create_task(self._serve(client, self.connections))
                self.connections += 1
                self._tasks.add(task)
                task.add_done_callback(functools.partial(self._ended, client))
        finally:
            self._reset()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        client.close()  # one that was canceled before it began has not done it
        self._tasks.discard(task)

    async def _serve(self, client: socket.socket, number: int) -> None:
        """One connection. Whatever ends it but two ends of file resets both sides."""
        family = socket.AF_INET6 if ":" in self.target[0] else socket.AF_INET
        server = socket.socket(family)
        sides = (client, server)
        for side in sides:
            side.setblocking(False)
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = [ways[number] if number < len(ways) else Way() for ways in self._ways]
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._loop.sock_connect(server, self.target)
            for index, way in enumerate(ways):
                chance = random.Random(f"{self.seed} {number} {index}")
                pump = self._pump(sides[index], sides[1 - index], way, chance)
                tasks.append(self._loop.create_task(pump))
            await asyncio.gather(*tasks)
        except (_Reset, OSError, asyncio.CancelledError):
            for side in sides:
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:  # a second cancellation may come here
                for side in sides:
                    side.close()

    async def _pump(
        self, source: socket.socket, to: socket.socket, way: Way, chance: random.Random
    ) -> None:
        """Forward one direction up to its end of file. What is under way is in a queue."""
        queue: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue(UNSENT)

        async def read() -> None:
            data: bytes | OSError = b"more"
            while data and isinstance(data, bytes):
                try:
                    data = await self._loop.sock_recv(source, MOST)
                except OSError as error:
                    data = error
                await queue.put((self._loop.time() + way.delay, data))

        reader = self._loop.create_task(read())
        try:
            offset = 0
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                if isinstance(data, OSError):
                    raise data
                if not data:
                    break
                for piece in self._cut(data, offset, way, chance):
                    await self._forward(to, piece, offset, way, chance)
                    offset += len(piece)
            to.shutdown(socket.SHUT_WR)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    @staticmethod
    def _cut(data: bytes, offset: int, way: Way, chance: random.Random) -> list[bytes]:
        """Cut data that begins at `offset`: where something is to happen, and into pieces."""
        marks = {mark - offset for mark in (way.pause_at, way.reset_after) if mark is not None}
        if way.pieces:
            at = 0
            while (at := at + chance.randint(1, way.pieces)) < len(data):
                marks.add(at)
        ends = [*sorted(mark for mark in marks if 0 < mark < len(data)), len(data)]
        return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    async def _forward(
        self, to: socket.socket, piece: bytes, offset: int, way: Way, chance: random.Random
    ) -> None:
        if way.pause_at == offset:
            await asyncio.sleep(way.pause)
        await self._open.wait()
        if way.reset_after == offset:
            raise _Reset  # 0: the first byte is enough to be reset
        at = -1 if way.flip_at is None else way.flip_at - offset
        if 0 <= at < len(piece):
            flipped = piece[at] ^ 1 << chance.randrange(8)
            piece = piece[:at] + bytes([flipped]) + piece[at + 1 :]
        await self._loop.sock_sendall(to, piece)
        if way.reset_after == offset + len(piece):
            await self._arrived(to)
            raise _Reset

    @staticmethod
    async def _arrived(to: socket.socket) -> None:
        """Wait until all is acknowledged: a reset throws away what is still unsent."""
        unsent = array.array("i", [1])
        for _ in range(1000):
            fcntl.ioctl(to, termios.TIOCOUTQ, unsent)
            if not unsent[0]:
                return
            await asyncio.sleep(0.001)
