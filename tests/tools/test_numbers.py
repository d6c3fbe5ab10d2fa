"""Numbers for a program that asks while it runs: ringcomm.stats(), and metrics for Prometheus."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Run

import ringcomm
from lab.limits import limit
from lab.ranks import Rank, Ranks, ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as pair:
        yield pair


def check_stats(rank: Rank) -> None:
    group = dist.new_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(250), group=group)
    dist.barrier(group=group)
    if rank.index == 1:
        time.sleep(2)  # the other may come late itself, by less
    dist.all_reduce(torch.ones(250), group=group)
    dist.all_to_all_single(torch.ones(2), torch.ones(2), group=group)
    numbers = ringcomm.stats(group)
    done = numbers["operations"]
    assert (done["all_reduce"]["operations"], done["all_reduce"]["bytes"]) == (4, 4000)
    assert (done["barrier"]["operations"], done["barrier"]["bytes"]) == (1, 0)
    assert (done["all_to_all"]["operations"], done["all_to_all"]["bytes"]) == (1, 8)
    assert set(numbers["waits"]) == {1 - rank.index}
    if rank.index == 0:
        assert 0.15 < numbers["waits"][1] < limit(10)
        assert done["all_reduce"]["seconds"] > 0.15
    assert not numbers["failure"]
    logged = ringcomm.stats(group, flat=True)
    assert logged["ringcomm/all_reduce/bytes"] == 4000
    assert logged[f"ringcomm/waits/{1 - rank.index}"] >= numbers["waits"][1 - rank.index]
    assert all(type(value) in (int, float) for value in logged.values())
    lines = ringcomm.metrics().splitlines()
    name = re.escape(group.group_name)
    wanted = rf'ringcomm_operations_total{{group="{name}",rank="{rank.index}",memory="host",'
    assert any(re.fullmatch(wanted + 'collective="all_reduce"} 4', line) for line in lines)
    for line in lines:  # Prometheus' text format
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+{(\w+="[^"]*",?)+} [0-9.e+-]+', line), line
    dist.destroy_process_group(group)
    other = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="is not ringcomm's, or was destroyed"):
        ringcomm.stats(other)
    dist.barrier()  # Gloo fails where one leaves while another still connects
    dist.destroy_process_group(other)


def test_numbers(two: Ranks) -> None:
    two(check_stats)


def test_what_goes_to_other_hosts_is_counted(job: Any, tmp_path: Path) -> None:
    text = job(
        "dist.all_reduce(torch.ones(1 << 20))\n"
        "print(f\"sent {ringcomm.stats()['sent_bytes']}\")\n"
        "dist.barrier()\n",
        RINGCOMM_TRANSPORT="tcp",
    )
    sent = [int(number) for number in re.findall(r"sent (\d+)", text)]
    assert len(sent) == 2
    assert all(4 << 20 <= number < 5 << 20 for number in sent)  # 2(n - 1)/n of 4 MiB


def test_lost_connections_are_counted(job: Any) -> None:
    text = job(
        "import socket\n"
        "before = ringcomm.stats()['lost_connections']\n"
        "dist.barrier()\n"
        "for name in os.listdir('/proc/self/fd') if rank == 0 else ():\n"
        "    try: link = socket.socket(fileno=os.dup(int(name)))\n"
        "    except OSError: continue\n"
        "    try: ends = {link.getsockname()[1], link.getpeername()[1]}\n"
        "    except (OSError, IndexError): continue\n"
        "    if int(os.environ['MASTER_PORT']) not in ends: link.shutdown(socket.SHUT_RDWR)\n"
        "dist.barrier()\n"
        "print(f\"lost {before} {ringcomm.stats()['lost_connections']}\")\n"
        "dist.barrier()\n",
        RINGCOMM_TRANSPORT="tcp",
    )
    lost = [(int(a), int(b)) for a, b in re.findall(r"lost (\d+) (\d+)", text)]
    assert len(lost) == 2, text
    assert all(before == 0 and after >= 1 for before, after in lost), text


def test_metrics_of_ranks_that_code_numbers(python: Run, tmp_path: Path) -> None:
    """`%r` is the rank of the group, not the variable RANK."""
    program = f"""
import os, time, torch.distributed as dist
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("ringcomm", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
while not all(os.path.exists(f"{tmp_path}/{{rank}}.prom") for rank in (0, 1)): time.sleep(0.01)
"""
    done = python(program, RINGCOMM_METRICS=f"{tmp_path}/%r.prom", RINGCOMM_TRACE=None, RANK=None)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f'rank="{rank}"' in (tmp_path / f"{rank}.prom").read_text()


def test_metrics_are_written_each_second(job: Any, tmp_path: Path) -> None:
    job(
        "path = f'metrics-{rank}.prom'\n"
        "dist.barrier()\n"
        "while not os.path.exists(path) or 'barrier' not in open(path).read(): time.sleep(0.01)\n"
        "dist.barrier()\n",
        RINGCOMM_TRACE=str(tmp_path),
        RINGCOMM_METRICS=str(tmp_path / "metrics-%r.prom"),
    )
    for rank in (0, 1):
        text = (tmp_path / f"metrics-{rank}.prom").read_text()
        assert f'ringcomm_operations_total{{group="0",rank="{rank}"' in text
