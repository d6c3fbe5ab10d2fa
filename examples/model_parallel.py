"""Train a model whose two halves live on two ranks, with `send` and `recv` by hand.

    torchrun --standalone --nproc-per-node 2 examples/model_parallel.py

Shows what a pipeline is made of: activations go forward, their gradient comes back, and each rank
calls `backward` on its own half. Both ranks also train the whole model alone; a rank exits with 1
when its half differs from that.
"""

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # or Gloo's threads outlive destroy_process_group()
from torch import nn

BATCH, WIDTH = 16, 32


def halves() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    front = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return front, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(dim=1, keepdim=True)


def front_step(front: nn.Module, inputs: torch.Tensor) -> None:
    activations = front(inputs)
    dist.send(activations.detach(), dst=1)
    gradient = torch.empty_like(activations)
    dist.recv(gradient, src=1)
    activations.backward(gradient)


def back_step(back: nn.Module, labels: torch.Tensor) -> float:
    activations = torch.empty(BATCH, WIDTH)
    dist.recv(activations, src=0)
    activations.requires_grad_()
    loss = nn.functional.mse_loss(back(activations), labels)
    loss.backward()
    assert activations.grad is not None
    dist.send(activations.grad, dst=0)
    return loss.item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks != 2:
        raise SystemExit(f"there are two halves, and {ranks} ranks: torchrun --nproc-per-node 2")

    half = halves()[rank]
    optimizer = torch.optim.SGD(half.parameters(), lr=0.05)
    whole = halves()
    whole_optimizer = torch.optim.SGD(nn.Sequential(*whole).parameters(), lr=0.05)
    first = last = 0.0
    for step in range(options.steps):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        if rank == 0:
            front_step(half, inputs)
        else:
            last = back_step(half, labels)
            first = first or last
        optimizer.step()

        whole_optimizer.zero_grad()
        nn.functional.mse_loss(whole[1](whole[0](inputs)), labels).backward()
        whole_optimizer.step()

    pairs = zip(half.parameters(), whole[rank].parameters(), strict=True)
    difference = max((a - b).abs().max().item() for a, b in pairs)
    dist.destroy_process_group()
    if rank == 1:
        words = f"loss={first:.2f}->{last:.2f} difference={difference:.1e}"
        print(f"{words} backend={options.backend} ranks={ranks}")
    return 0 if difference < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
