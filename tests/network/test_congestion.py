"""RINGCOMM_CONGESTION: the congestion control of connections, as the kernel has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Run

ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
PROGRAM = """
import os, socket, torch, torch.distributed as dist
rank = 1 if os.fork() == 0 else 0
dist.init_process_group("ringcomm", init_method="file://FOLDER/store", rank=rank, world_size=2)
dist.all_reduce(torch.ones(1000))
names = set()
for name in os.listdir("/proc/self/fd"):
    try:
        link = socket.socket(fileno=os.dup(int(name)))
        names.add(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(bytes(1))[0])
        link.detach()
    except OSError:
        continue
print(f"rank {rank}: {sorted(names)}\\n", end="", flush=True)
dist.barrier()
if rank == 0: os.wait()
"""


def run(python: Run, folder: Path, congestion: str) -> Any:
    program = PROGRAM.replace("FOLDER", str(folder))
    return python(program, RINGCOMM_TRANSPORT="tcp", RINGCOMM_CONGESTION=congestion)


@pytest.mark.parametrize("name", ALLOWED[:2])
def test_connections_have_it(python: Run, tmp_path: Path, name: str) -> None:
    done = run(python, tmp_path, name)
    assert done.returncode == 0, done.stderr
    assert f"rank 0: [b'{name}']" in done.stdout
    assert f"rank 1: [b'{name}']" in done.stdout


def test_one_that_the_kernel_has_not(python: Run, tmp_path: Path) -> None:
    done = run(python, tmp_path, "nonsense")
    assert done.returncode != 0
    assert "RINGCOMM_CONGESTION=nonsense (`sysctl net.ipv4.tcp_allowed" in done.stderr
    assert "lists what this host allows): No such file or directory" in done.stderr
