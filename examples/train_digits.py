"""Train a small CNN on scikit-learn's handwritten digits with DistributedDataParallel.

    torchrun --standalone --nproc-per-node 2 examples/train_digits.py

Stock PyTorch throughout: the one thing that names ringcomm is `--backend`. The data comes with
scikit-learn, so nothing is downloaded. Prints one line at the end, and exits with 1 when the
accuracy on digits it has not seen is below 0.95.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # or Gloo's threads outlive destroy_process_group()
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

ENOUGH = 0.95  # so many of the test digits


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 x 8 pixels, shuffled alike on every rank: 1437 to learn, 360 to test."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    learn, test = order[:1437], order[1437:]
    return TensorDataset(images[learn], labels[learn]), TensorDataset(images[test], labels[test])


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(model: nn.Module, data: TensorDataset, options: argparse.Namespace) -> None:
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        data, seed=options.seed
    )
    batches = DataLoader(data, batch_size=options.batch, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tqdm(total=options.epochs * len(batches), disable=dist.get_rank() != 0) as bar:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for images, labels in batches:
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bar.set_postfix(epoch=epoch + 1, loss=f"{loss.item():.3f}", refresh=False)
                bar.update()


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of `data` that `model` names right: each rank looks at a part of it."""
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in data.tensors)
    right = (model(images).argmax(dim=1) == labels).sum()
    dist.all_reduce(right)
    return right.item() / len(data)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="images a rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/digits.pt"))
    parser.add_argument("--parameters", type=Path, help="save the final parameters here")
    return parser.parse_args()


def main() -> int:
    options = parse()
    dist.init_process_group(options.backend)
    torch.manual_seed(options.seed)
    learn, test = digits(options.seed)
    model = DistributedDataParallel(network())

    start = time.perf_counter()
    train(model, learn, options)
    seconds = time.perf_counter() - start

    if dist.get_rank() == 0:
        options.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), options.checkpoint)
        if options.parameters:
            torch.save(model.module.state_dict(), options.parameters)
    dist.barrier()

    restored = network()
    restored.load_state_dict(torch.load(options.checkpoint))
    score = accuracy(restored, test)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    if options.backend == "gloo":  # a thread of Gloo's that drops a tensor as Python ends aborts
        time.sleep(0.1)
    if rank == 0:
        print(
            f"accuracy={score:.2f} backend={options.backend} ranks={ranks} seconds={seconds:.1f}",
            flush=True,
        )
    return 0 if score >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
