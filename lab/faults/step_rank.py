"""A rank of a training that is to go on when a rank dies, by other means than ringcomm's.

    step_rank.py FOLDER torchrun        under torchrun --max-restarts: all restart, from a file
    step_rank.py FOLDER torchft RANK SIZE LIGHTHOUSE   Manager and Gloo, each rank a replica

Each process writes a line into a file of its own for each step that it applies: when, and which.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PAUSE = 0.010  # seconds of a step
FOLDER = Path(sys.argv[1])


def writer() -> Callable[[int], None]:
    file = (FOLDER / f"rank-{os.getpid()}").open("a", buffering=1)

    def write(step: int) -> None:
        file.write(f"{time.monotonic()} {step}\n")

    return write


def restarted() -> None:
    """Rank 0 writes a checkpoint after each step: so one step is lost, and the start is paid."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 8))
    descent = torch.optim.SGD(model.parameters(), lr=0.01)
    path, step, write = FOLDER / "checkpoint", 0, writer()
    if path.exists():
        state = torch.load(path)
        model.module.load_state_dict(state["model"])
        step = state["step"]
    while True:
        descent.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        time.sleep(PAUSE)
        descent.step()
        step += 1
        write(step)
        if dist.get_rank() == 0:
            new = FOLDER / "new"
            torch.save({"model": model.module.state_dict(), "step": step}, new)
            new.replace(path)


def managed(rank: int, size: int, lighthouse: str) -> None:
    """Train as torchft's example train_ddp.py does, with that one's limits on time."""
    import torchft

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Linear(64, 8)
    descent = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state)

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=size - 1,
        load_state_dict=load,
        state_dict=model.state_dict,
        replica_id=f"replica{rank}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
    )
    write = writer()
    while True:
        manager.start_quorum()
        descent.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        time.sleep(PAUSE)
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        if manager.should_commit():
            descent.step()
            write(manager.current_step())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2] == "torchrun":
        restarted()
    else:
        managed(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
