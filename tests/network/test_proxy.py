"""The proxy does what it is told, at the byte where it is told."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from lab.limits import claim, limit
from lab.proxy import Proxy, Way

HOST = "127.0.0.1"
DATA = random.Random(1).randbytes(300_000)


class Peer:
    """A server that notes what each connection brought and how it ended, and may answer."""

    def __init__(self, answer: bytes = b"") -> None:
        self.answer = answer
        self.got: list[bytes] = []
        self.ends: list[str] = []
        self._listener = socket.create_server((HOST, 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    got, end = read_all(connection)
                    self.got.append(got)
                    self.ends.append(end)
                    with contextlib.suppress(OSError):
                        connection.sendall(self.answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@contextlib.contextmanager
def peer(answer: bytes = b"") -> Iterator[Peer]:
    server = Peer(answer)
    try:
        yield server
    finally:
        server.close()


def read_all(connection: socket.socket) -> tuple[bytes, str]:
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        return b"".join(parts), "reset"
    return b"".join(parts), "end"


def talk(proxy: Proxy, data: bytes = DATA) -> tuple[bytes, str]:
    """Send, say that it was all, and return what came back and how it ended."""
    try:
        with socket.create_connection(proxy.address, timeout=10) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return read_all(connection)
    except OSError:  # while it connected or sent
        return b"", "reset"


def until(what: list[str]) -> None:
    end = time.monotonic() + limit(5)
    while not what and time.monotonic() < end:
        time.sleep(0.005)


def test_all_arrives_in_both_directions() -> None:
    with peer(answer=DATA[::-1]) as server, Proxy(server.address) as proxy:
        for _ in range(3):
            assert talk(proxy) == (DATA[::-1], "end")
        assert server.got == [DATA] * 3
        assert proxy.connections == 3


@pytest.mark.parametrize("seed", [1, 2])
def test_in_pieces_and_with_delay(seed: int) -> None:
    way = Way(pieces=5000, delay=0.1)
    with peer(b"yes") as server, Proxy(server.address, [way], [way], seed) as proxy:
        begin = time.monotonic()
        assert talk(proxy) == (b"yes", "end")
        # Each way once, however much passes.
        assert 0.2 <= time.monotonic() - begin < claim(2)
        assert server.got == [DATA]


@pytest.mark.parametrize("offset", [0, 1, 2, 99, 100, 65536, 65537, 299_999, 300_000])
def test_a_reset_up_after_so_many_bytes(offset: int) -> None:
    ways = [Way(reset_after=offset)]
    with peer() as server, Proxy(server.address, up=ways) as proxy:
        assert talk(proxy)[1] == "reset"
        until(server.ends)
        assert (server.got, server.ends) == ([DATA[:offset]], ["reset"])
        assert talk(proxy) == (b"", "end")  # the next connection behaves well
        assert server.got[1] == DATA


@pytest.mark.parametrize("offset", [1, 1000, 3999])
def test_a_reset_down_after_so_many_bytes(offset: int) -> None:
    answer = DATA[:4000]
    with peer(answer) as server, Proxy(server.address, down=[Way(reset_after=offset)]) as proxy:
        assert talk(proxy, b"go") == (answer[:offset], "reset")


@pytest.mark.parametrize("offset", [0, 70_000, 299_999])
def test_a_flipped_bit(offset: int) -> None:
    ways = [Way(flip_at=offset, pieces=1000), Way()]
    wrong = []
    for _ in range(2):
        with peer() as server, Proxy(server.address, up=ways, seed=3) as proxy:
            assert talk(proxy) == (b"", "end")
        differ = [i for i, (a, b) in enumerate(zip(server.got[0], DATA, strict=True)) if a != b]
        assert differ == [offset]
        wrong.append(server.got[0][offset])
        assert (wrong[-1] ^ DATA[offset]).bit_count() == 1
    assert wrong[0] == wrong[1]  # the seed says which


def test_a_pause_at_an_offset() -> None:
    ways = [Way(pause_at=1000, pause=0.3)]
    with peer() as server, Proxy(server.address, up=ways) as proxy:
        begin = time.monotonic()
        assert talk(proxy) == (b"", "end")
        assert 0.3 <= time.monotonic() - begin < claim(3)
        assert server.got == [DATA]


def test_pause_resume_and_reset_by_hand() -> None:
    with peer(b"yes") as server, Proxy(server.address) as proxy:
        with socket.create_connection(proxy.address, timeout=0.2) as connection:
            proxy.pause()
            connection.sendall(b"x")
            connection.shutdown(socket.SHUT_WR)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            proxy.resume()
            connection.settimeout(10)
            assert connection.recv(3) == b"yes"
        with socket.create_connection(proxy.address, timeout=10) as connection:
            connection.sendall(b"x")
            while proxy.connections < 2:
                time.sleep(0.005)
            proxy.reset()
            assert read_all(connection) == (b"", "reset")


def test_nobody_behind_it_is_a_reset() -> None:
    with socket.create_server((HOST, 0)) as gone:
        address = gone.getsockname()
    with Proxy(address) as proxy:
        assert talk(proxy, b"x") == (b"", "reset")
