"""Average gradients by hand, and get what DistributedDataParallel gets.

    torchrun --standalone --nproc-per-node 2 examples/average_gradients.py

Shows three ways after `backward()`: an all_reduce a parameter; all of them in one coalesced call;
one all_reduce of all gradients in one flat tensor. Exits with 1 when one of them differs from DDP.
"""

import argparse
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def one_by_one(gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)


def asynchronous(gradients: list[torch.Tensor]) -> None:
    works = []
    for gradient in gradients:
        gradient /= dist.get_world_size()
        works.append(dist.all_reduce(gradient, async_op=True))
    for work in works:
        work.wait()


def coalesced(gradients: list[torch.Tensor]) -> None:
    with dist._coalescing_manager():
        for gradient in gradients:
            gradient /= dist.get_world_size()
            dist.all_reduce(gradient)


def flat(gradients: list[torch.Tensor]) -> None:
    buffer = torch.cat([gradient.flatten() for gradient in gradients])
    buffer /= dist.get_world_size()
    dist.all_reduce(buffer)
    parts = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


WAYS: list[Callable[[list[torch.Tensor]], None]] = [one_by_one, asynchronous, coalesced, flat]


def network() -> nn.Sequential:
    torch.manual_seed(0)  # the same on every rank
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def gradients_of(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model(inputs).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    options = parser.parse_args()
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))

    expected = gradients_of(DistributedDataParallel(network()), inputs)
    differences = {}
    for way in WAYS:
        gradients = gradients_of(network(), inputs)
        way(gradients)
        pairs = zip(gradients, expected, strict=True)
        differences[way.__name__] = max((a - b).abs().max().item() for a, b in pairs)
    dist.destroy_process_group()

    if rank == 0:
        words = " ".join(f"{name}={value:.1e}" for name, value in differences.items())
        print(f"difference from DDP: {words} backend={options.backend} ranks={ranks}")
    return 0 if max(differences.values()) < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
