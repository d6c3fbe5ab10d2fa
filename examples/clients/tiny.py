"""The common parts of these scripts: a tiny network, its data, and the checks at the end.

A client may cut the data as it likes: the network notes what it learns from. So one process can
train again on what all ranks saw, with the mean of their gradients, and must get the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 6  # with two ranks
BATCH = 8  # a rank and step
RATE = 0.1

Result = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # parameters, batches
Cost = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # takes outputs and inputs
Model = tuple[nn.Module, Cost] | None


class Network(nn.Module):
    """Two layers, the same on every rank. It notes each batch that it learns from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.seen: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(inputs.detach().clone())
        return self.layers(inputs)


def points() -> torch.Tensor:
    """Return the inputs to learn from. There are no labels: `loss` knows what is right."""
    return torch.randn(2 * STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1))


def loss(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return (outputs - inputs.sum(1, keepdim=True).sin()).square().mean()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def made_of(group: dist.ProcessGroup) -> str:
    """The backend that moves a group's tensors, whatever name it was asked for by."""
    backend = group._get_backend(torch.device("cpu"))
    return "ringcomm" if type(backend).__module__.startswith("ringcomm") else backend.name()


def alone(
    seen: Sequence[Sequence[torch.Tensor]], network: nn.Module, cost: Cost = loss
) -> list[torch.Tensor]:
    """Train a new network in this process on what each rank saw; return the parameters."""
    descent = optimizer(network.parameters())
    for batches in zip(*seen, strict=True):
        descent.zero_grad()
        for inputs in batches:
            (cost(network(inputs), inputs) / len(batches)).backward()
        descent.step()
    return [parameter.detach() for parameter in network.parameters()]


def alike(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether two lists hold the same bits."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def digest(parameters: Sequence[torch.Tensor]) -> str:
    whole = b"".join(parameter.contiguous().numpy().tobytes() for parameter in parameters)
    return hashlib.sha256(whole).hexdigest()[:16]


def check(client: str, backend: str, everybody: Sequence[Result], model: Model = None) -> str:
    """Look at what each rank ended with and what it saw; return a line that says so.

    Raises ArithmeticError when ranks differ, saw the same data, or got no mean of their gradients.
    """
    mine = everybody[0][0]
    if not all(alike(mine, theirs) for theirs, _ in everybody):
        raise ArithmeticError("the ranks ended with different parameters: nothing was averaged")
    batches = [batch for _, seen in everybody for batch in seen]
    if len({digest([batch]) for batch in batches}) < STEPS * len(everybody):
        raise ArithmeticError("a batch was seen twice: equal parameters would show nothing")
    network, cost = model or (Network(), loss)
    expected = alone([seen for _, seen in everybody], network, cost)
    pairs = zip(mine, expected, strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    if not difference < 1e-6:
        raise ArithmeticError(f"one process alone gets other parameters, by {difference:.1e}")
    steps = len(everybody[0][1])
    return (
        f"client={client} steps={steps} difference={difference:.1e} "
        f"parameters={digest(mine)} backend={backend} ranks={len(everybody)}"
    )


def finish(client: str, parameters: Any, seen: Sequence[torch.Tensor], model: Model = None) -> None:
    """Check on every rank of the default group what came of the training; rank 0 says it."""
    mine = [parameter.detach().clone() for parameter in parameters]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (mine, list(seen)))
    backend = made_of(dist.distributed_c10d._get_default_group())
    line = check(client, backend, everybody, model)
    if dist.get_rank() == 0:
        print(line, flush=True)
