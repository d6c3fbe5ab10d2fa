"""Train on while ranks die, leave and come: stock DDP, optimizer and DataLoader.

    ringcomm elastic store --port 29500 &
    for i in 1 2 3; do RINGCOMM_ELASTIC=127.0.0.1:29500 python examples/elastic.py & done

Kill one, by `kill -9`: the others go on within milliseconds. Start one more: it joins them. Trains
a small network on scikit-learn's handwritten digits. Rank 0 prints one line at the end, and exits
with 1 if the accuracy on digits that it has not seen is below 0.9.
"""

import argparse
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, TensorDataset

import ringcomm.elastic as elastic

ENOUGH = 0.9  # so many of the test digits


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 64 pixels: 1437 to learn, 360 to test."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    learn, test = order[:1437], order[1437:]
    return TensorDataset(images[learn], labels[learn]), TensorDataset(images[test], labels[test])


class Net(nn.Sequential):
    def __init__(self) -> None:
        hidden = nn.BatchNorm1d(128)
        super().__init__(nn.Linear(64, 128), hidden, nn.ReLU(), nn.Linear(128, 10))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", help="host:port; default: RINGCOMM_ELASTIC")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that begin")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, in each step")
    parser.add_argument("--checkpoints", help="a folder; default: none are written")
    return parser.parse_args()


def main() -> int:
    options = parse()
    torch.manual_seed(0)
    learn, test = digits()

    world = elastic.join(
        options.store, min_size=1, start=options.ranks, timeout=timedelta(minutes=2)
    )
    net = Net().to(world.device)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 1000)
    sampler = elastic.Sampler(len(learn), batch_size=16, seed=0)
    loader = DataLoader(learn, batch_sampler=sampler, num_workers=options.workers)
    model = DDP(net, init_sync=False)  # world.track gives all ranks the state of rank 0
    world.track(model=model, opt=opt, sched=sched, sampler=sampler)
    if options.checkpoints:
        world.checkpoint(options.checkpoints, every=50)
    world.leave(on_signal=signal.SIGTERM)

    for epoch in range(sampler.epoch, options.epochs):
        for x, y in world.batches(loader):
            with world.step():
                opt.zero_grad()
                loss = F.cross_entropy(model(x.to(world.device)), y.to(world.device))
                loss.backward()
                opt.step()
                sched.step()
            time.sleep(options.pause)
        if world.rank == 0:
            print(f"epoch={epoch} ranks={world.size} loss={loss.item():.3f}", flush=True)

    net.eval()
    images, labels = test.tensors
    with torch.no_grad():
        right = (net(images.to(world.device)).argmax(dim=1).cpu() == labels).float().mean().item()
    if world.rank == 0:
        print(f"accuracy={right:.2f} ranks={world.size} steps={world.step_number}", flush=True)
    return 0 if right >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
