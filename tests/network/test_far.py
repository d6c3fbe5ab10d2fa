"""Hosts that are far from one another: what is under way fills the path."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from lab.hosts import Hosts, RankResult
from lab.limits import claim, limit
from lab.namespaces import missing
from lab.wan import Wan

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("far"),
]

PROGRAM = """
import json, os, time, torch, torch.distributed as dist
dist.init_process_group("ringcomm")
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.arange(60_000, dtype=torch.float64) * (rank + 1)
expected = torch.arange(60_000, dtype=torch.float64)
total = size * (size + 1) / 2

def check(got, factor):
    assert torch.equal(got, expected * factor), (got, factor)

whole = mine.clone()
dist.all_reduce(whole)
check(whole, total)
whole = mine.clone()
dist.broadcast(whole, 1)
check(whole, 2)
parts = [torch.empty_like(mine) for _ in range(size)]
dist.all_gather(parts, mine)
[check(part, at + 1) for at, part in enumerate(parts)]
dist.gather(mine, parts if rank == 1 else None, 1)
got = torch.empty_like(mine)
dist.scatter(got, [expected * (at + 3) for at in range(size)] if rank == 0 else None, 0)
check(got, rank + 3)
dist.reduce_scatter(got, [mine * (at + 1) for at in range(size)])
check(got, total * (rank + 1))
dist.all_to_all(parts, [mine * (at + 1) for at in range(size)])
[check(part, (at + 1) * (rank + 1)) for at, part in enumerate(parts)]
# More than the inbox for messages holds.
after, before = (rank + 1) % size, (rank - 1) % size
large = torch.full((6 << 20,), rank, dtype=torch.uint8)
back = torch.empty_like(large)
work = dist.isend(large, after)
dist.recv(back, before)
work.wait()
assert bool((back == before).all())
dist.barrier()
begin = time.perf_counter()
dist.all_reduce(torch.ones(BYTES // 4))
seconds = time.perf_counter() - begin
if rank == 0: print(json.dumps(seconds))
dist.barrier()
dist.destroy_process_group()
"""


ROUNDS = """
import json, sys, torch, torch.distributed as dist
dist.init_process_group("ringcomm")
rank = dist.get_rank()
for turn in range(12):
    open(f"{sys.argv[1]}/round{turn}", "w").close()
    for step in range(4):
        tensor = torch.full((1 << 18,), float(rank + turn + step))
        dist.all_reduce(tensor)
        assert bool((tensor == 1 + 2 * (turn + step)).all()), (turn, step, tensor)
if rank == 0: print(json.dumps(0))
dist.barrier()
dist.destroy_process_group()
"""
STORE = 29500  # the port of the first run's store


def run(hosts: Hosts, ranks_per_host: int, size: int, folder: Path) -> list[RankResult]:
    script = folder / "program.py"
    script.write_text(PROGRAM.replace("BYTES", str(size)))
    return hosts.run_ranks([sys.executable, script], ranks_per_host, timeout=limit(20))


def check(results: list[RankResult]) -> float:
    """Require that all have ended well; the seconds of the last all_reduce."""
    for result in results:
        assert result.returncode == 0, result.output[-3000:]
    return float(json.loads(results[0].output.splitlines()[-1]))


@pytest.mark.parametrize(
    ("delay", "count", "ranks_per_host"),
    [(25, 2, 2), (3, 3, 1), pytest.param(25, 4, 1, marks=pytest.mark.slow)],
)
def test_every_collective(tmp_path: Path, delay: float, count: int, ranks_per_host: int) -> None:
    """Over round trips of 6 and 50 ms; ranks of one host share memory as well."""
    with Hosts(count, far=Wan(1000, delay)) as hosts:
        check(run(hosts, ranks_per_host, 1 << 20, tmp_path))


def test_what_is_under_way_fills_the_path(tmp_path: Path) -> None:
    """8 MiB take 0.67 s at 100 Mbit/s, and 1.7 s where 0.5 MiB are under way at most.

    A round trip takes 200 ms.
    """
    with Hosts(2, far=Wan(100, 100)) as hosts:
        seconds = check(run(hosts, 1, 8 << 20, tmp_path))
    assert seconds < claim(1.3)


@pytest.mark.parametrize("loss", [1.0, pytest.param(3.0, marks=pytest.mark.slow)])
def test_packets_are_lost(tmp_path: Path, loss: float) -> None:
    with Hosts(2, far=Wan(300, 25, loss)) as hosts:
        check(run(hosts, 1, 1 << 20, tmp_path))


def test_connections_are_reset_and_a_host_is_silent(tmp_path: Path) -> None:
    """Nothing is lost by it: bytes under way are sent again."""
    script = tmp_path / "program.py"
    script.write_text(ROUNDS)
    with Hosts(2, far=Wan(300, 25)) as hosts:

        def trouble() -> None:
            for turn in range(3):
                begun, deadline = tmp_path / f"round{4 * turn + 2}", time.monotonic() + limit(30)
                while not begun.exists():
                    assert time.monotonic() < deadline, "the ranks do not go on"
                    time.sleep(0.01)
                if turn == 1:
                    hosts.cut(1)
                    time.sleep(0.5)  # how long it is silent
                    hosts.heal(1)
                else:
                    assert hosts.kill_connections(0, spare=STORE) > 0

        command: list[str | Path] = [sys.executable, script, tmp_path]
        results = hosts.run_ranks(command, timeout=limit(20), meanwhile=trouble)
    check(results)
