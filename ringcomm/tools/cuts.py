"""Cut TCP connections between processes of this machine, from outside and without root.

Linux (since 5.6) gives a copy of a process's descriptor to those that may trace it: its parent, in
most systems. Through the copy the connection is shut down, and both ends see it break.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

PIDFD_GETFD = 438  # the number of the system call, which glibc has no function for before 2.36
ESTABLISHED = "01"

Ends: TypeAlias = "tuple[str, str]"  # of a connection: this process's, and the other one's


def cut(pid: int, others: Iterable[int]) -> int:
    """Cut the connections of a process to the others; returns how many there were.

    Raises OSError where the system refuses it.
    """
    theirs = {ends for other in others for _, _, ends in _connections(other)}
    mine = [place for place in _connections(pid) if place[2][::-1] in theirs]
    if mine:
        process = os.pidfd_open(pid)
        try:
            return sum(_shut_down(process, descriptor, inode) for descriptor, inode, _ in mine)
        finally:
            os.close(process)
    return 0


def _shut_down(process: int, descriptor: int, inode: int) -> bool:
    call = ctypes.CDLL(None, use_errno=True).syscall
    copy = call(PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if os.fstat(copy).st_ino != inode:  # that number means something else by now
        os.close(copy)
        return False
    with socket.socket(fileno=copy) as connection, contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    return True


def _connections(pid: int) -> list[tuple[int, int, Ends]]:
    """Return each TCP connection of a process: its descriptor, its inode, and its ends."""
    known: dict[str, Ends] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # the process has ended, or there is no IPv6
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                _, local, remote, state, *rest = line.split()
                if state == ESTABLISHED:
                    known[rest[5]] = _end(local), _end(remote)
    connections = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                inode = str(path.readlink()).removeprefix("socket:[").removesuffix("]")
                if inode in known:
                    connections.append((int(path.name), int(inode), known[inode]))
    return connections


def _end(address: str) -> str:
    """Return an end in one form for an IPv4 address, which IPv6 sockets write as a longer one."""
    host, port = address.split(":")
    return f"{host.removeprefix('0000000000000000FFFF0000')}:{port}"
