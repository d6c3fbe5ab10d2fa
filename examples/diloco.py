"""DiLoCo: sites train by themselves, and average what they have learnt every so many steps.

    torchrun --standalone --nproc-per-node 2 examples/diloco.py
    torchrun --standalone --nproc-per-node 2 examples/diloco.py --backend gloo --outer fp32

Each rank is a site. It takes `--inner` steps of AdamW on its own data. Then the sites average how
far they have moved, and an outer optimiser, SGD with Nesterov momentum, takes that for a gradient
(Douillard et al. 2023, arXiv 2311.08105). So they talk once for many steps, and `--outer int8`
says it in a quarter of the bytes. The model predicts the letters of this file, so nothing is
downloaded. Prints one line at the end, and exits with 1 when the loss is above `--enough`, or when
sites end up with different parameters. benchmarks/diloco_sites.py runs it between two sites.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # or Gloo's threads outlive destroy_process_group()
from torch import nn

import ringcomm

LETTERS = 128  # ASCII
CONTEXT = 32  # letters that the model sees


class Model(nn.Module):
    """A small transformer over letters."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        hidden = self.letters(text) + self.places(torch.arange(length))
        later = nn.Transformer.generate_square_subsequent_mask(length)
        scores: torch.Tensor = self.head(self.body(hidden, mask=later, is_causal=True))
        return scores


def batch(text: torch.Tensor, size: int, chance: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=chance)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])


def loss_of(model: nn.Module, letters: torch.Tensor) -> torch.Tensor:
    scores = model(letters[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), letters[:, 1:].flatten())


def average(numbers: torch.Tensor, outer: str) -> None:
    if outer != "fp32":
        ringcomm.compression.quantized_all_reduce(numbers, op=dist.ReduceOp.AVG, format=outer)
    else:  # Gloo has no AVG
        dist.all_reduce(numbers)
        numbers /= dist.get_world_size()


def outer_step(
    model: nn.Module, shared: torch.Tensor, momentum: torch.Tensor, options: argparse.Namespace
) -> None:
    """Move `shared`, the parameters that all sites know, and begin there again."""
    parameters = list(model.parameters())
    gradient = shared - nn.utils.parameters_to_vector(parameters).detach()
    average(gradient, options.outer)
    momentum.mul_(options.momentum).add_(gradient)
    shared -= options.outer_rate * (gradient + options.momentum * momentum)  # Nesterov
    nn.utils.vector_to_parameters(shared.clone(), parameters)


def train(options: argparse.Namespace) -> tuple[list[float], list[float], bool]:
    """Return each outer step's mean loss and seconds, and whether sites are alike at the end."""
    rank = dist.get_rank()
    text = torch.tensor([byte % LETTERS for byte in Path(__file__).read_bytes()])
    torch.manual_seed(options.seed)  # all sites begin alike
    model = Model(options.width, options.layers)
    inner = torch.optim.AdamW(model.parameters(), lr=options.rate)
    shared = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    momentum = torch.zeros_like(shared)
    chance = torch.Generator().manual_seed(1000 * options.seed + rank)  # and see other data
    average(torch.zeros_like(shared), options.outer)  # makes connections and groups
    losses, seconds = [], []
    for _ in range(options.steps):
        total = torch.zeros(())
        for _ in range(options.inner):
            loss = loss_of(model, batch(text, options.batch, chance))
            inner.zero_grad()
            loss.backward()
            inner.step()
            total += loss.detach() / options.inner
        dist.all_reduce(total)
        began = time.perf_counter()
        outer_step(model, shared, momentum, options)
        seconds.append(time.perf_counter() - began)
        losses.append(total.item() / dist.get_world_size())
    return losses, seconds, are_alike(shared)


def are_alike(shared: torch.Tensor) -> bool:
    """Whether all sites have the same bits."""
    lowest, highest = shared.clone(), shared.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    ways = ["int8", "fp8", "bf16", "fp32"]
    parser.add_argument("--outer", choices=ways, default="int8", help="how sites average")
    parser.add_argument("--steps", type=int, default=8, help="outer ones")
    parser.add_argument("--inner", type=int, default=20, help="steps between two outer ones")
    parser.add_argument("--batch", type=int, default=16, help="pieces of text a site and step")
    parser.add_argument("--rate", type=float, default=2e-3, help="of AdamW")
    parser.add_argument("--outer-rate", type=float, default=0.7, help="of the outer optimiser")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer optimiser")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--enough", type=float, default=3.0, help="the loss to be reached")
    return parser.parse_args()


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    losses, seconds, alike = train(options)
    if dist.get_rank() == 0:
        middle = sorted(seconds)[len(seconds) // 2]
        print(
            f"loss={losses[0]:.2f}->{losses[-1]:.4f} outer={options.outer} seconds={middle:.4f} "
            f"alike={alike} backend={options.backend} ranks={dist.get_world_size()}"
        )
    dist.destroy_process_group()
    return 0 if alike and losses[-1] < options.enough else 1


if __name__ == "__main__":
    sys.exit(main())
