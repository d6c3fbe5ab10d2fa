"""Ranks on several hosts: right results whatever happens to the network, and who is missing."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hosts import Hosts
from namespaces import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(180),
]

Answers = list[dict[str, Any]]


def run(
    hosts: Hosts,
    kind: str,
    seconds: float,
    meanwhile: Callable[[], object] | None = None,
    ranks_per_host: int = 1,
    **env: str | None,
) -> Answers:
    """What every rank that ended by itself says; the others are left out.

    `meanwhile` is called once every rank has been through its first operation.
    """
    with tempfile.TemporaryDirectory() as folder:

        def once_running() -> None:
            end = time.monotonic() + 60
            while len(list(Path(folder).iterdir())) < hosts.count * ranks_per_host:
                assert time.monotonic() < end, "the ranks do not begin"
                time.sleep(0.02)
            if meanwhile is not None:
                meanwhile()

        script = str(ROOT / "tests" / "network_rank.py")
        command = [sys.executable, script, kind, str(seconds), folder]
        fault = once_running if meanwhile is not None else None
        results = hosts.run_ranks(command, ranks_per_host, env, timeout=90, meanwhile=fault)
    answers = []
    for rank, result in enumerate(results):
        lines = [line for line in result.output.splitlines() if line.startswith("{")]
        if lines:
            answers.append(json.loads(lines[-1]))
        else:
            assert result.returncode == -signal.SIGKILL, f"rank {rank}: {result.output}"
    return answers


def good(answers: Answers, ranks: int) -> None:
    assert [answer["rank"] for answer in answers] == list(range(ranks))
    assert {answer["error"] for answer in answers} == {""}
    assert len({answer["operations"] for answer in answers}) == 1
    assert max(answer["destroyed"] for answer in answers) < 2


@pytest.mark.parametrize(("count", "local"), [(2, 1), (3, 1), (2, 2)])
def test_every_collective(count: int, local: int) -> None:
    with Hosts(count) as hosts:
        answers = run(hosts, "everything", 2, ranks_per_host=local)
        good(answers, count * local)
        assert answers[0]["operations"] >= 16


def test_every_collective_over_ipv6_and_two_flows() -> None:
    with Hosts(2, ipv4=False, ipv6=True) as hosts:
        good(run(hosts, "everything", 1, RINGCOMM_FLOWS="2"), 2)


def test_a_killed_rank_is_named_within_a_second() -> None:
    killed = 0.0

    def fault() -> None:
        nonlocal killed
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "environ").read_bytes().split(b"\0")
                program = (process / "cmdline").read_bytes().split(b"\0")[0]
            except (OSError, ProcessLookupError):
                continue
            mine = f"RINGCOMM_PORTS={ports}".encode() in words and b"RANK=2" in words
            if mine and b"python" in program:
                killed = time.time()
                os.kill(int(process.name), signal.SIGKILL)

    ports = f"{43000 + os.getpid() % 1000}-44500"
    with Hosts(4) as hosts:
        answers = run(hosts, "all_reduces", 60, fault, RINGCOMM_PORTS=ports)
    assert [answer["rank"] for answer in answers] == [0, 1, 3]
    for answer in answers:
        assert "rank 2" in answer["error"]
        assert "its process died" in answer["error"]
        assert "all_reduce #" in answer["error"]
        assert answer["told_at"] - killed < 1 + answer["destroyed"]


@pytest.mark.parametrize("local", [1, 2])
def test_a_mismatch_is_an_error_on_every_rank(local: int) -> None:
    with Hosts(3 if local == 1 else 2) as hosts:
        answers = run(hosts, "mismatch", 60, ranks_per_host=local)
    assert len(answers) == (3 if local == 1 else 4)
    for answer in answers:
        assert answer["took"] < 1, answer
        assert "float32[1000]" in answer["error"]
        assert "float32[1001]" in answer["error"]


def test_strangers_do_not_disturb() -> None:
    """Port scans, silence, slow ones and nonsense: bounded, and nothing is said to them."""
    ports = f"{45000 + os.getpid() % 1000}-46500"
    first = int(ports.partition("-")[0])
    stats: list[int] = []

    def fault() -> None:
        script = f"import test_network as t; t.bother_from_inside({hosts.addresses[0]!r}, {first})"
        env = {"PYTHONPATH": str(ROOT / "tests")}
        process = hosts.start(1, [sys.executable, "-c", script], env)
        stats.append(process.wait())

    with Hosts(2) as hosts:
        answers = run(hosts, "all_reduces", 6, fault, RINGCOMM_PORTS=ports)
    good(answers, 2)
    assert stats == [0]
    assert max(answer["descriptors"] for answer in answers) < 40


def bother_from_inside(address: str, port: int) -> None:
    """Run on a host of the lab: 1,200 connections that are no rank's."""

    def bother(kind: int) -> None:
        silent = []
        for number in range(400):
            stranger = socket.create_connection((address, port), timeout=2)
            stranger.settimeout(0.05)
            if kind == 0:  # says nothing, and stays
                silent.append(stranger)
                continue
            stranger.sendall(os.urandom(200) if kind == 1 else b"G" * (number % 90))
            try:
                answer = stranger.recv(100)
            except OSError:
                answer = b""
            if answer:
                os._exit(3)  # somebody was let in
            stranger.close()

    threads = [threading.Thread(target=bother, args=(kind,)) for kind in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_another_secret_is_refused() -> None:
    with Hosts(2) as hosts:
        command = [sys.executable, str(ROOT / "tests" / "network_rank.py"), "everything", "1"]
        secret = ["sh", "-c", 'RINGCOMM_SECRET="s$RANK" exec "$@"', "sh"]
        env = {"RINGCOMM_RESUME_SECONDS": "2"}
        for result in hosts.run_ranks([*secret, *command], env=env, timeout=60):
            assert "no answer from" in result.output
            assert "it does not know the secret of this job" in result.output
