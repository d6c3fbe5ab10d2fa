"""Long operations on tensors of devices between hosts: in pieces, while connections are cut."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing
from lab.simulated_device import SIMULATED

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(300),
]
STORE = 29999  # its connections are not ringcomm's to mend
DEVICES = {"RINGCOMM_CUDA_LIBRARY": str(SIMULATED), "MASTER_PORT": str(STORE)}

# Tensors of the CPU stand in for those of a device. All sums are exact.
ROUNDS = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
folder = Path(sys.argv[1])
dist.init_process_group("ringcomm")
me, size = dist.get_rank(), dist.get_world_size()
COUNT = 5 * (1 << 20) // 4 * 2 + 13  # float32: 10 MiB and some
places = torch.arange(COUNT) % 1000
whole, total = places.float(), size * (size + 1) // 2
stop, number = torch.zeros(1), 0
while stop[0] == 0:
    tensor = whole * (me + 1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, whole * total), "all_reduce"
    root, tensor = number % size, whole + me
    dist.broadcast(tensor, root)
    assert torch.equal(tensor, whole + root), "broadcast"
    tensor = whole + me
    dist.reduce(tensor, root)
    assert me != root or torch.equal(tensor, whole * size + total - size), "reduce"
    part, parts = whole[: COUNT // size] + me, torch.empty(COUNT // size * size)
    dist.all_gather_into_tensor(parts, part)
    every = torch.cat([whole[: COUNT // size] + peer for peer in range(size)])
    assert torch.equal(parts, every), "all_gather"
    dist.reduce_scatter_tensor(part, every + me)
    mine = whole[: COUNT // size] + me
    assert torch.equal(part, mine * size + total - size), "reduce_scatter"
    dist.scatter(part, list((every + 1).chunk(size)) if me == root else None, root)
    assert torch.equal(part, mine + 1), "scatter"
    gathered = [torch.empty_like(part) for _ in range(size)] if me == root else None
    dist.gather(part, gathered, root)
    assert gathered is None or torch.equal(torch.cat(gathered), every + 1), "gather"
    dist.all_to_all_single(parts, every + 1000 * me)
    for peer, got in enumerate(parts.chunk(size)):
        assert torch.equal(got, mine + 1000 * peer), "all_to_all"
    far = lambda a: (a + 1 + number) % size  # to which rank `a` sends much, if 0 most
    sent = [[COUNT // 2 // (1 + a) if b == far(a) else 7 * b for b in range(size)]
            for a in range(size)]
    got = [row[me] for row in sent]
    parts = torch.empty(sum(got))
    dist.all_to_all_single(parts, whole[: sum(sent[me])] + 1000 * me, got, sent[me])
    rows = [whole[: sum(row)].split(row)[me] + 1000 * a for a, row in enumerate(sent)]
    assert torch.equal(parts, torch.cat(rows)), "uneven all_to_all"
    number += 1
    (folder / f"round{number}-{me}").touch()
    if "DIE" in os.environ: continue
    stop[0] = float(me == 0 and (folder / "stop").exists())
    dist.all_reduce(stop)
records = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
assert records.flight_record()[-1]["sequence"] == 10 * number, "numbers"
dist.destroy_process_group()
print("good")
"""


def await_file(path: Path) -> None:
    end = time.monotonic() + limit(20)
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.01)


@pytest.mark.parametrize("local", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_connections_are_cut_meanwhile(tmp_path: Path, local: int) -> None:
    cut = 0

    def reset() -> None:
        nonlocal cut
        await_file(tmp_path / "round1-0")
        end = time.monotonic() + limit(20)
        while cut < 15 and time.monotonic() < end:
            cut += hosts.kill_connections(cut % 2, count=1, spare=STORE)
            time.sleep(0.1)
        (tmp_path / "stop").touch()

    with Hosts(2) as hosts:
        command: list[str | Path] = [sys.executable, "-c", ROUNDS, tmp_path]
        results = hosts.run_ranks(command, local, DEVICES, timeout=limit(60), meanwhile=reset)
    assert cut >= 15
    for result in results:
        assert (result.returncode, "good" in result.output) == (0, True), result.output
        assert "ranks are on several hosts" in result.output


def test_a_rank_of_another_host_dies(tmp_path: Path) -> None:
    """In the middle of an operation that has begun: by a copy's number in its stream."""
    faults = {"RINGCOMM_SIM_DIES_AT": "200", "RINGCOMM_SIM_RANK": "3", "DIE": "1"}
    with Hosts(2) as hosts:
        command: list[str | Path] = [sys.executable, "-c", ROUNDS, tmp_path]
        results = hosts.run_ranks(command, 2, {**DEVICES, **faults}, timeout=limit(30))
    assert results[3].returncode == -signal.SIGKILL
    for result in results[:3]:
        assert "rank 3" in result.output.splitlines()[-1], result.output
