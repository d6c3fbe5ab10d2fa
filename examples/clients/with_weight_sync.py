"""Weight updates from trainers to an inference engine, in the groups of SGLang and verl.

python examples/clients/with_weight_sync.py

Two trainers are in one process group, the two ranks of an engine in another, and after each step
the first trainer broadcasts its weights to the engine in a third group between them. The engine
uses groups for Gloo beside its own to agree on what came.

This imports neither SGLang nor verl, and makes their calls of torch by itself, private ones among
them: those of SGLang's init_custom_process_group (which comes from
OpenRLHF) and WeightUpdater, and of verl's initialize_global_process_group. It was written after
SGLang 0.5.23 and verl 0.9.1. What SGLang sends in an HTTP request goes through a store here.

Gloo has no float8. With `--backend gloo` those weights travel as bytes.
"""

from __future__ import annotations

import argparse
import pickle
import socket
from datetime import timedelta
from typing import Any

import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

HOST = "127.0.0.1"
RANKS = 2  # of the trainers, and of the engine
UPDATE = 1 + RANKS  # the first trainer and the engine
TIMEOUT = timedelta(seconds=60)
TYPES = {
    "embedding": torch.float32,
    "attention": torch.bfloat16,
    "expert": torch.float8_e4m3fn,
    "expert.scale": torch.float32,
}

Weights = dict[str, torch.Tensor]


def gradient(step: int, trainer: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + trainer)
    return torch.randn(len(TYPES), 33, 65, generator=generator)


def weights(master: torch.Tensor) -> Weights:
    """Convert a trainer's float32 parameters to the types that the engine computes with."""
    return {name: part.to(kind) for (name, kind), part in zip(TYPES.items(), master, strict=True)}


def expected(steps: int) -> list[torch.Tensor]:
    """Return the bits of the weights after so many steps, computed in this process alone."""
    master = torch.zeros(len(TYPES), 33, 65)
    for step in range(steps):
        master -= tiny.RATE * (gradient(step, 0) + gradient(step, 1))
    return bits(weights(master))


def bits(tensors: Weights) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8) for tensor in tensors.values()]


def update_group(backend: str, port: int, rank: int) -> dist.ProcessGroup:
    """Make a group of processes that have different default groups, as SGLang does."""
    store, rank, size = next(rendezvous(f"tcp://{HOST}:{port}", rank, UPDATE, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    group, _ = _new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(backend),
        PrefixStore("weights", store),
        group_name="weights",
        backend_options=None,
        timeout=TIMEOUT,
        device_id=None,
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    dist.barrier(group)
    return group


def transfer(tensors: Weights, group: dist.ProcessGroup) -> None:
    """Broadcast each tensor without waiting for the one before, as SGLang does."""
    if tiny.made_of(group) == "gloo":
        tensors = {
            name: tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            for name, tensor in tensors.items()
        }
    works = [dist.broadcast(tensor, 0, group, async_op=True) for tensor in tensors.values()]
    for work in works:
        work.wait()


def transfer_flat(tensors: Weights, group: dist.ProcessGroup) -> None:
    """Broadcast all as one tensor of bytes, as SGLang does with flattened buckets."""
    parts = [part.flatten() for part in bits(tensors)]
    bucket = torch.cat(parts)
    dist.broadcast(bucket, 0, group)
    for part, came in zip(parts, bucket.split([len(part) for part in parts]), strict=True):
        part.copy_(came)


def trainer(rank: int, backend: str, store: dist.Store, port: int) -> None:
    dist.init_process_group(
        f"cpu:{backend}",  # verl names the device
        store=PrefixStore("trainers", store),
        rank=rank,
        world_size=RANKS,
        timeout=TIMEOUT,
    )
    group = update_group(backend, port, 0) if rank == 0 else None
    master = torch.zeros(len(TYPES), 33, 65)
    for step in range(tiny.STEPS):
        mean = gradient(step, rank)
        dist.all_reduce(mean)
        master -= tiny.RATE * mean
        if group:
            new = weights(master)
            request = [(name, tensor.dtype, tensor.shape) for name, tensor in new.items()]
            store.set(f"request {step}", pickle.dumps(request))
            (transfer_flat if step % 2 else transfer)(new, group)
    dist.barrier()
    if group:
        dist.destroy_process_group(group)
    dist.destroy_process_group()


def engine(rank: int, backend: str, store: dist.Store, port: int) -> None:
    dist.init_process_group(
        backend,
        store=PrefixStore("engine", store),
        rank=rank,
        world_size=RANKS,
        timeout=TIMEOUT,
    )
    beside = dist.new_group(list(range(RANKS)), backend="gloo", timeout=TIMEOUT)
    group = update_group(backend, port, 1 + rank)
    for step in range(tiny.STEPS):
        request: list[Any] = [None]
        if rank == 0:
            request = [pickle.loads(store.get(f"request {step}"))]
        dist.broadcast_object_list(request, 0, group=beside)
        new = {name: torch.empty(shape, dtype=kind) for name, kind, shape in request[0]}
        (transfer_flat if step % 2 else transfer)(new, group)
        dist.monitored_barrier(beside, TIMEOUT, wait_all_ranks=True)
        came = tiny.digest(bits(new))
        digests: list[Any] = [None] * RANKS
        dist.all_gather_object(digests, came, group=beside)
        if digests != [tiny.digest(expected(step + 1))] * RANKS:
            raise ArithmeticError(f"other weights came than were sent in step {step}: {digests}")
    if rank == 0:
        print(
            f"client=weight-sync steps={tiny.STEPS} difference=0 parameters={came} "
            f"backend={tiny.made_of(group)} ranks={RANKS}",
            flush=True,
        )
    dist.destroy_process_group(group)
    dist.destroy_process_group()


def start(index: int, backend: str, place: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, place, is_master=False)
    (trainer if index < RANKS else engine)(index % RANKS, backend, store, port)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm", choices=["ringcomm", "gloo"])
    options = parser.parse_args()
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    mp.spawn(start, args=(options.backend, store.port, free_port()), nprocs=2 * RANKS)


if __name__ == "__main__":
    main()
