"""torchft over ringcomm: replicas that may come and go, each a process here.

python examples/clients/with_torchft.py

torchft makes a new process group whenever replicas change, by a class of its own; it has one for
Gloo and one for NCCL. ringcomm brings the one for ringcomm.
"""

import argparse
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchft
from torchft.coordination import LighthouseServer

from ringcomm.torchft import ProcessGroupRingcomm

HOST = "127.0.0.1"


def replica(index: int, backend: str, lighthouse: str, results: Any) -> None:
    """One replica: its own store and its own rank 0; torchft joins it to the other."""
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=60)
    if backend == "ringcomm":
        group: Any = ProcessGroupRingcomm(timeout=timeout)
    else:
        group = torchft.ProcessGroupGloo(timeout=timeout)
    network = tiny.Network()
    manager = torchft.Manager(
        pg=group,
        min_replica_size=2,
        load_state_dict=network.load_state_dict,
        state_dict=network.state_dict,
        use_async_quorum=False,  # both take part from the first step on
        init_sync=False,  # they begin alike
        replica_id=f"replica{index}",
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname=HOST,
        timeout=timeout,
    )
    model = torchft.DistributedDataParallel(manager, network)
    descent = torchft.Optimizer(manager, tiny.optimizer(network.parameters()))
    for inputs in tiny.points().split(tiny.BATCH)[index::2]:
        descent.zero_grad()
        tiny.loss(model(inputs), inputs).backward()
        descent.step()
    if manager.current_step() != tiny.STEPS:
        raise ArithmeticError(f"{manager.current_step()} steps were committed: see the log")
    used = tiny.made_of(manager._pg._pg)
    parameters = [parameter.detach().numpy() for parameter in network.parameters()]
    results.put((index, used, parameters, [batch.numpy() for batch in network.seen]))
    manager.shutdown(wait=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm", choices=["ringcomm", "gloo"])
    options = parser.parse_args()
    lighthouse = LighthouseServer(bind=f"{HOST}:0", min_replicas=2)
    context = mp.get_context("spawn")
    results = context.Queue()
    address = f"http://{HOST}:{lighthouse.address().rsplit(':', 1)[1]}"
    words = (options.backend, address, results)
    replicas = mp.spawn(replica, args=words, nprocs=2, join=False)
    ended = sorted((results.get(timeout=120) for _ in range(2)), key=lambda result: result[0])
    while not replicas.join():
        pass
    lighthouse.shutdown()
    everybody = [
        ([torch.from_numpy(part) for part in parameters], [torch.from_numpy(part) for part in seen])
        for _, _, parameters, seen in ended
    ]
    print(tiny.check(f"torchft-{version('torchft')}", ended[0][1], everybody))


if __name__ == "__main__":
    main()
