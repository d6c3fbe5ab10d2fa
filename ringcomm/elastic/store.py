"""The store of a run: who serves it, and how it is found.

`python -m ringcomm.elastic store --port 29500` serves one, and nothing else.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)  # of a request


def connect(address: str | Any | None) -> Any:
    """Return the store at "host:port", or the one that is given.

    None: that of RINGCOMM_ELASTIC, else of MASTER_ADDR and MASTER_PORT. Where nobody serves it, and
    the host is this one, this process does; under a launcher that gives ranks, rank 0 does.
    Raises ValueError for an address that is none, RuntimeError where nobody answers.
    """
    if address is not None and not isinstance(address, str):
        return address
    given = address or os.environ.get("RINGCOMM_ELASTIC")
    text = given or _of_launcher()
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"{text!r} is no address of a store: give join() host:port, or set RINGCOMM_ELASTIC"
        )
    served_by_agent = not given and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not served_by_agent and _may_serve(host) and (store := serve(host, int(port))):
        return store
    return dist.TCPStore(host, int(port), is_master=False, timeout=TIMEOUT)


def _of_launcher() -> str:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return f"{host}:{port}"


def _may_serve(host: str) -> bool:
    if os.environ.get("RANK", "0") != "0":
        return False
    try:
        family, _, _, _, at = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((at[0], 0))
    except OSError:
        return False
    return True


def serve(host: str, port: int) -> Any:
    """Serve a store there; None where another process does."""
    try:
        return dist.TCPStore(host, port, is_master=True, timeout=TIMEOUT, wait_for_workers=False)
    except RuntimeError:
        return None
