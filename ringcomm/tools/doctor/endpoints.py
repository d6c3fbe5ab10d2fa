"""Addresses with ports, and listeners as the library makes them (csrc/net/address.h)."""

from __future__ import annotations

import errno
import os
import socket

from ringcomm._runtime.addresses import family


def endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(text: str) -> tuple[str, int]:
    """Return host and port of "10.0.0.1:4000" or "[fd00::1]:4000"."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def listen(address: str, ports: range) -> socket.socket:
    """Listen on the first free port of the range. Raises OSError that names the remedy."""
    trouble = 0
    for port in ports:
        listener = socket.socket(family(address), socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if listener.family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            trouble = error.errno or 0
            if trouble != errno.EADDRINUSE:
                break
            continue
        listener.setblocking(False)
        return listener
    remedy = "choose another interface with RINGCOMM_IFNAME, or other ports with RINGCOMM_PORTS"
    if trouble == errno.EADDRINUSE:
        remedy = "give RINGCOMM_PORTS a free port for each rank of this host"
    raise OSError(
        trouble,
        f"cannot listen on {address} at ports {ports[0]}-{ports[-1]} ({remedy}): "
        f"{os.strerror(trouble)}",
    )
