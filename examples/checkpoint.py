"""Start every rank from rank 0's parameters, save a checkpoint on rank 0, and resume on all.

    torchrun --standalone --nproc-per-node 2 examples/checkpoint.py

Shows the broadcast of a `state_dict`; an object that only rank 0 knows, sent to all; a barrier
between the save on one rank and the load on every rank. Exits with 1 when the ranks differ, or when
the resumed training takes another step than the one that went on.
"""

import argparse
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # or Gloo's threads outlive destroy_process_group()
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Training:
    """A model and its optimizer, which are saved and restored together."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def broadcast(self) -> None:
        for _, tensor in sorted(self.model.state_dict().items()):  # parameters and buffers
            dist.broadcast(tensor, src=0)

    def steps(self, data: torch.Tensor, count: int) -> None:
        model = DistributedDataParallel(self.model)
        for _ in range(count):
            self.optimizer.zero_grad()
            model(data).square().mean().backward()
            self.optimizer.step()

    def save(self, path: Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location="cpu")  # wherever it was when it was saved
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def vector(training: Training) -> torch.Tensor:
    """All of the model's state in one tensor, to compare."""
    tensors = training.model.state_dict().values()
    return torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors])


def same_everywhere(tensor: torch.Tensor) -> bool:
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor)
    return all(torch.equal(tensor, other) for other in others)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="ringcomm")
    options = parser.parse_args()
    dist.init_process_group(options.backend, timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # every rank has parameters and data of its own
    training, data = Training(), torch.randn(32, 4)
    checks = {"unlike before": ranks == 1 or not same_everywhere(vector(training))}
    training.broadcast()
    checks["alike after"] = same_everywhere(vector(training))

    training.steps(data, 5)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = Path(str(folder[0])) / "checkpoint.pt"
    if rank == 0:
        training.save(path)
    dist.barrier()  # the file is there
    resumed = Training()
    resumed.load(path)
    dist.barrier()  # all have read it
    if rank == 0:
        shutil.rmtree(path.parent)
    checks["restored alike"] = same_everywhere(vector(resumed))

    training.steps(data, 1)
    resumed.steps(data, 1)
    checks["resumed"] = torch.equal(vector(resumed), vector(training))
    dist.destroy_process_group()
    if rank == 0:
        print(f"{checks} backend={options.backend} ranks={ranks}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
