"""Three replicas under torchft: one is killed in the all_reduce of the others, and starts again.

python -m lab.replicas [--native]

It needs torchft. Each replica is a process with a store of its own; a lighthouse joins them. The
last line tells what the replicas ended with. `--native` gives Manager the default group, which
torch 2.14 and a torchft newer than 0.2.0 can do.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchft
from torchft.coordination import LighthouseServer

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)
FATAL = 5  # the step in which replica 2 dies
MORE = 5  # steps that all make once it is back
SECONDS = 240  # for all


def group_of(native: bool, store: dist.TCPStore) -> Any:
    if native:
        own = dist.PrefixStore("default", store)
        dist.init_process_group(
            "ringcomm", store=own, rank=0, world_size=1, timeout=TIMEOUT, enable_reconfigure=True
        )
        return dist.group.WORLD
    from ringcomm.torchft import ProcessGroupRingcomm

    return ProcessGroupRingcomm(timeout=TIMEOUT)


def digest(network: torch.nn.Module) -> str:
    parts = [part.detach().numpy().tobytes() for part in network.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def replica(index: int, life: int, native: bool, lighthouse: str, last: Any, said: Any) -> None:
    """Train until step `last`, which is set once all are there."""
    torch.set_num_threads(1)
    torch.manual_seed(index)  # they begin differently: the first quorum makes them equal
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    network = torch.nn.Linear(64, 8)
    descent = torch.optim.SGD(network.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        network.load_state_dict(state["network"])

    group = group_of(native, store)
    manager = torchft.Manager(
        pg=group,
        min_replica_size=2,
        load_state_dict=load,
        state_dict=lambda: {"network": network.state_dict()},
        use_async_quorum=False,
        replica_id=f"replica{index}_{life}",
        rank=0,
        world_size=1,
        store_addr=HOST,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname=HOST,
        timeout=TIMEOUT,
    )
    while manager.current_step() < last.value:
        manager.start_quorum()
        loss = network(torch.randn(4, 64)).square().mean()
        descent.zero_grad()
        loss.backward()
        if index == 2 and life == 0 and manager.current_step() == FATAL:
            time.sleep(0.3)  # the others are in their all_reduce
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in network.parameters():
            manager.allreduce(parameter.grad).wait()
        committed = manager.should_commit()
        if committed:
            descent.step()
        said.put(("step", index, life, manager.current_step(), manager.num_participants()))
        time.sleep(0.05)
    said.put(("end", index, life, manager.current_step(), digest(network)))
    manager.shutdown(wait=False)
    if native:
        group.abort()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--native", action="store_true")
    options = parser.parse_args()
    lighthouse = LighthouseServer(bind=f"{HOST}:0", min_replicas=2, join_timeout_ms=2000)
    address = f"http://{HOST}:{lighthouse.address().rsplit(':', 1)[1]}"
    context = mp.get_context("spawn")
    last, said = context.Value("i", 1 << 30), context.Queue()

    def start(index: int, life: int) -> Any:
        args = (index, life, options.native, address, last, said)
        process = context.Process(target=replica, args=args, daemon=True)
        process.start()
        return process

    processes = [start(index, 0) for index in range(3)]
    ended: dict[int, str] = {}
    died = back = False
    limit = time.monotonic() + SECONDS
    while len(ended) < 3:
        if not died and processes[2].exitcode is not None:
            assert processes[2].exitcode == -signal.SIGKILL, processes[2].exitcode
            died = True
            processes[2] = start(2, 1)
        if time.monotonic() > limit:
            sys.exit("replicas did not end in time")
        try:
            kind, index, life, step, word = said.get(timeout=0.2)
        except queue.Empty:
            continue
        print(kind, index, life, step, word, flush=True)
        if kind == "end":
            ended[index] = word
        elif index == 2 and life == 1 and word == 3 and not back:
            back = True
            last.value = step + MORE
    for process in processes:
        process.join(30)
    lighthouse.shutdown()
    print(f"replicas=3 healed={back} digests={len(set(ended.values()))}")


if __name__ == "__main__":
    main()
