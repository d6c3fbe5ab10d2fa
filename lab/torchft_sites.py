"""A site of examples/sites.py under torchft's DiLoCo on Gloo, for benchmarks/diloco_sites.py.

    python -m lab.torchft_sites --rounds 6 --every 50 ...

It takes the options of examples/sites.py, and prints the line that it prints. It runs as one rank
of `Hosts.run_ranks`, with the Python of scripts/clients.sh, which finds examples/. The first round
is not counted: in it, sites find one another, and get one model.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import diloco
import sites
import torch
import torch.distributed as dist
import torchft
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

PORT = 29490  # of the lighthouse, on the first host
PATIENCE = timedelta(minutes=5)


def own_address(master: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, PORT))
        return str(probe.getsockname()[0])


def manager_of(net: Any, rank: int, master: str, address: str, store: dist.TCPStore) -> Any:
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=PATIENCE),
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,  # they begin with one seed
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        replica_id=f"site{rank}",
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{master}:{PORT}",
        hostname=address,
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
    )


class Timed:
    """The seconds that calls of a function take."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return self._function(*arguments)
        finally:
            self.seconds += time.perf_counter() - began


def train(options: argparse.Namespace, rank: int, master: str) -> str:
    """Return a line about the run."""
    text = torch.tensor([byte % diloco.LETTERS for byte in Path(diloco.__file__).read_bytes()])
    torch.manual_seed(options.seed)
    net = diloco.Model(options.width, options.layers)
    inner = torch.optim.AdamW(net.parameters(), lr=options.rate)
    rate, momentum = options.outer_rate, options.momentum
    outer = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    address = own_address(master)
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = manager_of(net, rank, master, address, store)
    averaging = DiLoCo(
        manager,
        [net],
        inner,
        outer,
        sync_every=options.every,
        fragment_sync_delay=options.delay,
        fragment_update_alpha=0.5 if options.delay else 0.0,
    )
    waits = Timed(averaging._step_post_hook)
    averaging._step_post_hook = waits
    chance = torch.Generator().manual_seed(1000 * options.seed + rank)
    began = steps = 0.0
    with averaging:
        while (rounds := manager.current_step()) <= options.rounds:
            if rounds == 1 and not began:
                began, steps, waits.seconds = time.perf_counter(), 0, 0.0
            loss = diloco.loss_of(net, diloco.batch(text, options.batch, chance))
            inner.zero_grad()
            loss.backward()
            inner.step()
            steps += 1
    seconds = time.perf_counter() - began
    net.load_state_dict(averaging._fragments[0].original_parameters, strict=False)
    sample = diloco.batch(text, 512, torch.Generator().manual_seed(0))
    with torch.no_grad():
        reached = diloco.loss_of(net, sample).item()
    equal = sum(p.double().sum().item() for p in net.parameters()).hex()
    manager.shutdown(wait=False)
    return (
        f"loss={reached:.4f} rounds={options.rounds} steps={steps:.0f} seconds={seconds:.2f} "
        f"waited={waits.seconds:.3f} sum={equal} losses=0"
    )


def main() -> None:
    rank, master = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    torch.set_num_threads(1)
    if rank == 0:
        lighthouse = LighthouseServer(
            bind=f"{master}:{PORT}", min_replicas=2, join_timeout_ms=60_000
        )
    print(train(sites.parse(), rank, master), flush=True)
    if rank == 0:
        time.sleep(2)  # the other site may still ask it
        lighthouse.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
