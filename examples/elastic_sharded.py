"""Train a sharded model on while ranks die and come: FSDP2 in units, which are replicas.

    ringcomm elastic store --port 29500 &
    for i in 1 2 3 4; do RINGCOMM_ELASTIC=127.0.0.1:29500 python examples/elastic_sharded.py & done

Two ranks make a unit, which holds one copy of the model. Kill one, by `kill -9`: the other unit
goes on within milliseconds. Start one more: with the mate of the dead one it makes a unit again.
Rank 0 prints one line at the end, and exits with 1 if the loss is above 0.5.
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
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import ringcomm.elastic as elastic

ENOUGH = 0.5  # the loss of the last step


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 10)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        result: torch.Tensor = self.layers[-1](x)
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, in each step")
    parser.add_argument("--checkpoints", help="a folder; default: none are written")
    options = parser.parse_args()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target, dtype=torch.int64))
    torch.manual_seed(0)

    world = elastic.join(unit=2, start=4, timeout=timedelta(minutes=2))
    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=world.mesh["shard"])
    fully_shard(net, mesh=world.mesh["shard"])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    sampler = elastic.Sampler(len(dataset), batch_size=16, seed=0)
    world.track(model=net, opt=opt, sampler=sampler)
    if options.checkpoints:
        world.checkpoint(options.checkpoints, every=50)
    world.leave(on_signal=signal.SIGTERM)

    loader = DataLoader(dataset, batch_sampler=sampler)
    for _ in range(sampler.epoch, options.epochs):
        for x, y in world.batches(loader):
            with world.step():
                opt.zero_grad()
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
            time.sleep(options.pause)
    if world.rank == 0:
        print(f"loss={loss.item():.3f} ranks={world.size} steps={world.step_number}", flush=True)
    return 0 if loss.item() <= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
