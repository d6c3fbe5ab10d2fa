"""Train through a parameter server over RPC, beside a group that checks the result.

    torchrun --standalone --nproc-per-node 2 examples/parameter_server.py

Shows an object that lives on rank 0 and is held by all as an RRef; a call that answers only once
every trainer has called (`async_execution`); and that RPC, with its own connections, and a process
group do not get into each other's way. Exits with 1 when the trainers end with other parameters
than a training on all of the data in one process.
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # or Gloo's threads outlive destroy_process_group()
from torch import nn
from torch.distributed import rpc

TRUTH = torch.tensor([[1.0], [-2.0], [3.0]])


class Server:
    """Holds the parameters, and averages the gradients of all trainers before each step."""

    def __init__(self, trainers: int) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.trainers = trainers
        self.waiting: list[list[torch.Tensor]] = []
        self.answer: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @staticmethod
    @rpc.functions.async_execution
    def update(
        server: "rpc.RRef[Server]", gradients: list[torch.Tensor]
    ) -> torch.futures.Future[list[torch.Tensor]]:
        """Answer the new parameters, once the gradients of all trainers are here."""
        self = server.local_value()
        answer = self.answer
        self.waiting.append(gradients)
        if len(self.waiting) == self.trainers:
            for parameter, *grads in zip(self.model.parameters(), *self.waiting, strict=True):
                parameter.grad = torch.stack(grads).mean(dim=0)
            self.optimizer.step()
            self.waiting, self.answer = [], torch.futures.Future()
            answer.set_result(self.parameters())
        return answer


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs @ TRUTH


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs, labels = batch(step, rank)
    return nn.functional.mse_loss(model(inputs), labels)


def start_rpc(rank: int, ranks: int) -> None:
    """RPC meets where the group met, at the launcher's store, and then opens ports of its own."""
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # all ranks are on this host
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://", rpc_timeout=60)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=ranks, rpc_backend_options=options)


def train(server: "rpc.RRef[Server]", steps: int) -> tuple[list[torch.Tensor], bool]:
    """Train on this rank, as rank 0 asks; return the last parameters, and whether all have them."""
    model = network()
    for step in range(steps):
        model.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        fresh = rpc.rpc_sync(server.owner(), Server.update, args=(server, gradients))
        for parameter, value in zip(model.parameters(), fresh, strict=True):
            parameter.data.copy_(value)
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    alike = all(torch.equal(mine, other) for other in all_of_them)
    return [parameter.detach() for parameter in model.parameters()], alike


def train_alone(steps: int, ranks: int) -> list[torch.Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        losses = [loss_of(model, step, rank) for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start_rpc(rank, ranks)

    good = True
    if rank == 0:
        server = rpc.RRef(Server(ranks))
        names = [f"rank{trainer}" for trainer in range(ranks)]
        calls = [rpc.rpc_async(name, train, args=(server, options.steps)) for name in names]
        parameters, alike = zip(*torch.futures.wait_all(calls), strict=True)
        pairs = zip(parameters[0], train_alone(options.steps, ranks), strict=True)
        difference = max((a - b).abs().max().item() for a, b in pairs)
        good = all(alike) and difference < 1e-5
    rpc.shutdown()  # waits until all have finished
    dist.destroy_process_group()
    if rank == 0:
        words = f"alike={all(alike)} difference={difference:.1e}"
        print(f"{words} backend={options.backend} ranks={ranks}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
