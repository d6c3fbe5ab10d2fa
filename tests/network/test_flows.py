"""RINGCOMM_FLOWS: how many connections there are between two processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from conftest import Run

from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing

DIFFER = """
import os, sys
rank = 1 if os.fork() == 0 else 0
os.environ["RINGCOMM_FLOWS"] = ("auto", "4")[rank]
import torch, torch.distributed as dist
dist.init_process_group("ringcomm", init_method="file://FOLDER/store", rank=rank, world_size=2)
try:
    dist.all_reduce(torch.ones(1000))
except dist.DistBackendError as error:
    print(f"rank {rank}: {error}\\n", end="", flush=True)
if rank == 0: os.wait()
"""

# Sends for longer than a first trial, until the second card carries a quarter, or too long.
SECOND = """
import json, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("ringcomm")

def sent(card):
    return int(Path(f"/sys/class/net/{card}/statistics/tx_bytes").read_text())

tensor, began, share = torch.ones(1 << 20), time.monotonic(), 0.0
go_on = torch.ones(1)
while go_on.item():
    before = sent("eth0"), sent("eth1")
    dist.all_reduce(tensor.fill_(1))
    assert bool((tensor == 2).all())
    first, second = sent("eth0") - before[0], sent("eth1") - before[1]
    share = second / (first + second)
    passed = time.monotonic() - began
    go_on.fill_(float(passed < 4 or (share < 0.25 and passed < SECONDS)))
    dist.broadcast(go_on, 0)
if dist.get_rank() == 0: print(json.dumps(share), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_another_number_on_another_rank(python: Run, tmp_path: Path) -> None:
    program = DIFFER.replace("FOLDER", str(tmp_path))
    done = python(program, RINGCOMM_TRANSPORT="tcp", RINGCOMM_RESUME_SECONDS="1")
    told = "RINGCOMM_FLOWS is auto here and 4 there", "RINGCOMM_FLOWS is 4 here and auto there"
    assert any(text in done.stdout for text in told), done


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.timeout(120)
def test_auto_finds_the_second_card() -> None:
    with Hosts(2, rate="100mbit") as hosts:
        hosts.second_network("100mbit")
        program = SECOND.replace("SECONDS", str(limit(40)))
        ranks = hosts.run_ranks([sys.executable, "-c", program], 1, timeout=limit(90))
    assert all(rank.returncode == 0 for rank in ranks), ranks[0].output
    assert json.loads(ranks[0].output.splitlines()[-1]) >= 0.25
