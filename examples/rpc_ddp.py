"""Train a model that is partly replicated by DDP, and partly remote by RPC.

    torchrun --standalone --nproc-per-node 3 examples/rpc_ddp.py

The last rank holds an embedding; the others are trainers, which look rows up by RPC and run the
dense layers under DistributedDataParallel, over a group of their own. Shows RRefs, distributed
autograd, which carries gradients back to the embedding and lets DDP average the dense ones, and
DistributedOptimizer, which steps both. Exits with 1 when the parameters are not those of the same
training in one process.
"""

import argparse
import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, RATE = 50, 8, 0.1
GROUPS: dict[str, dist.ProcessGroup] = {}  # what a call by RPC finds on its rank


def embedding() -> nn.EmbeddingBag:
    torch.manual_seed(1)
    return nn.EmbeddingBag(WORDS, WIDTH, mode="sum")


def dense() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def batch(step: int, trainer: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + trainer)
    words = torch.randint(WORDS, (16, 4), generator=generator)
    return words, words.float().mean(dim=1, keepdim=True) / WORDS


class Table:
    """The part of the model that lives on one rank."""

    def __init__(self) -> None:
        self.module = embedding()

    def look_up(self, words: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.module(words)
        return rows

    def weight(self) -> "rpc.RRef[torch.Tensor]":
        return rpc.RRef(self.module.weight)

    def value(self) -> torch.Tensor:
        return self.module.weight.detach()


def start_rpc(rank: int, ranks: int) -> None:
    """RPC meets at a port of its own, which rank 0 finds and tells the others."""
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # all ranks are on this host
    port = [0]
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, src=0)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # or nobody would listen at that port
    address = f"tcp://127.0.0.1:{port[0]}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=address, rpc_timeout=60)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=ranks, rpc_backend_options=options)


def train(table: "rpc.RRef[Table]", steps: int) -> list[torch.Tensor]:
    """Run a trainer; return the parameters of the dense layers."""
    trainers = GROUPS["trainers"]
    model = DistributedDataParallel(dense(), process_group=trainers)
    parameters = [table.rpc_sync().weight()] + [rpc.RRef(p) for p in model.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=RATE)
    for step in range(steps):
        words, labels = batch(step, dist.get_rank())
        with autograd.context() as context:
            loss = nn.functional.mse_loss(model(table.rpc_sync().look_up(words)), labels)
            autograd.backward(context, [loss])
            dist.barrier(group=trainers)  # all have looked up before anybody changes the table
            for turn in range(dist.get_world_size(trainers)):  # two at once may lose one
                if turn == dist.get_rank(trainers):
                    optimizer.step(context)
                dist.barrier(group=trainers)
    return [parameter.detach() for parameter in model.parameters()]


def train_alone(trainers: int, steps: int) -> list[torch.Tensor]:
    """The same in one process: DDP takes the mean of the gradients, the table their sum."""
    table, model = embedding(), dense()
    for step in range(steps):
        batches = [batch(step, trainer) for trainer in range(trainers)]
        losses = [nn.functional.mse_loss(model(table(words)), want) for words, want in batches]
        inner = torch.autograd.grad(sum(losses) / trainers, model.parameters(), retain_graph=True)
        (outer,) = torch.autograd.grad(sum(losses), table.weight)
        with torch.no_grad():
            table.weight -= RATE * outer
            for parameter, gradient in zip(model.parameters(), inner, strict=True):
                parameter -= RATE * gradient
    return [tensor.detach() for tensor in (table.weight, *model.parameters())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks < 2:
        raise SystemExit("one rank holds the table, so there must be two at least")
    GROUPS["trainers"] = dist.new_group(list(range(ranks - 1)))
    start_rpc(rank, ranks)

    difference = 0.0
    if rank == 0:  # it makes the table, and has all trainers begin
        table = rpc.remote(f"rank{ranks - 1}", Table)
        calls = [
            rpc.rpc_async(f"rank{trainer}", train, args=(table, options.steps))
            for trainer in range(ranks - 1)
        ]
        expected = train_alone(ranks - 1, options.steps)
        for trained in torch.futures.wait_all(calls):
            pairs = zip([table.rpc_sync().value(), *trained], expected, strict=True)
            difference = max(difference, *((a - b).abs().max().item() for a, b in pairs))
    rpc.shutdown()  # waits until all have finished
    dist.destroy_process_group()
    if rank == 0:
        print(f"difference={difference:.1e} backend={options.backend} ranks={ranks}")
    return 0 if difference < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
