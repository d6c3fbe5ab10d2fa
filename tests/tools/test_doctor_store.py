"""A store that accepts a connection and falls silent: the doctor ends in time, and says so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lab.limits import claim, limit
from lab.ports import free_port
from lab.proxy import Proxy, Way

DOCTOR = (sys.executable, "-m", "ringcomm", "doctor", "--wait", "8")
IN_TIME = claim(30)  # seconds that the page of the doctor promises


def start(rank: int, port: int, out: Path) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [*DOCTOR, "--json", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **place, "MASTER_PORT": str(port)},
    )


def await_port(port: int) -> None:
    end = time.monotonic() + limit(60)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.1)


def examine(folder: Path, up: list[Way], down: list[Way]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run two ranks, the second one through a proxy; return what each reports."""
    port, outs = free_port(), [folder / "0.json", folder / "1.json"]
    first = start(0, port, outs[0])
    await_port(port)
    with Proxy(("127.0.0.1", port), up, down) as proxy:
        second = start(1, proxy.address[1], outs[1])
        for process in (first, second):
            _, said = process.communicate(timeout=limit(60))
            assert process.returncode == 2, said
    first_told, other = (json.loads(out.read_text()) for out in outs)
    return first_told, other


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize(
    "offset",
    [pytest.param(0, marks=pytest.mark.slow), 100, pytest.param(1000, marks=pytest.mark.slow)],
)
def test_a_store_that_falls_silent(direction: str, offset: int, tmp_path: Path) -> None:
    # The first connection only looks whether the port is open. Of each later one, so many bytes
    # pass: none, a part of the greeting, or more than that and less than a whole examination.
    silent = [Way(), *[Way(pause_at=offset, pause=1e6)] * 9]
    first, second = examine(tmp_path, *((silent, []) if direction == "up" else ([], silent)))
    for told in (first, second):
        assert told["seconds"] < IN_TIME
    sentences = [finding["sentence"] for finding in second["findings"]]
    (silent_one,) = [sentence for sentence in sentences if "silent" in sentence]
    assert silent_one.startswith("The store at 127.0.0.1:")
    assert not any("never came" in sentence for sentence in sentences)  # this rank cannot know
    assert any("Rank 1" in finding["sentence"] for finding in first["findings"])
