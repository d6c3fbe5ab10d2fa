"""How much of a DDP step is communication that nothing hides.

    python benchmarks/ddp_step.py
    python benchmarks/ddp_step.py --batch 256 --json ddp.json

Trains a perceptron of 25 million parameters with stock DistributedDataParallel
(gradient_as_bucket_view=True), by turns with its gradients exchanged and with a communication
hook that does nothing. The step minus the step that exchanges nothing is the exposed
communication. The backends take turns too. A step takes as long as on its slowest rank, and the
ranks meet before each.
"""

import argparse
import contextlib
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab import benchmark, report
from lab.benchmark import BenchmarkError, Measured
from lab.ranks import Rank

Steps = dict[str, list[float]]  # seconds of each step, "exchanging" or "silent"


def nothing(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave every rank's gradients as they are: a communication hook.

    DDP reads its annotations, so this file does without `from __future__ import annotations`.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Trainer:
    """A model with its optimizer and its data, on one rank."""

    def __init__(self, rank: Rank, sizes: tuple[int, int, int], hook: Any = None) -> None:
        width, layers, batch = sizes
        torch.manual_seed(1)
        modules = [nn.Linear(width, width) for _ in range(layers)]
        network = nn.Sequential(*(part for layer in modules for part in (layer, nn.ReLU())))
        self.model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        if hook:
            self.model.register_comm_hook(None, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        torch.manual_seed(100 + rank.index)
        self.data, self.wanted = torch.randn(batch, width), torch.rand(batch, width)

    def step(self) -> float:
        """Train once; returns seconds."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(self.data), self.wanted).backward()
        self.optimizer.step()
        return time.perf_counter() - start

    def checksums(self) -> list[int]:
        """Return a sum over the bits of each parameter: equal models give equal lists."""
        return [
            int(parameter.detach().view(torch.int32).sum(dtype=torch.int64))
            for parameter in self.model.parameters()
        ]


def build(rank: Rank, sizes: tuple[int, int, int]) -> int:
    """Make both models and warm them up; returns the number of parameters of each."""
    trainers = {"exchanging": Trainer(rank, sizes), "silent": Trainer(rank, sizes, nothing)}
    for trainer in trainers.values():
        for _ in range(3):  # DDP sorts its buckets anew after the first
            trainer.step()
    rank.kept.update(trainers)
    return sum(parameter.numel() for parameter in trainers["silent"].model.parameters())


def time_steps(rank: Rank, steps: int) -> Steps:
    """Train both models by turns; returns the seconds of each step on this rank."""
    times: Steps = {kind: [] for kind in rank.kept}
    for number in range(steps + 1):
        for kind, trainer in rank.kept.items():
            seconds = trainer.step()
            if number:  # the first step finds caches as the other backend left them
                times[kind].append(seconds)
    return times


def checksums(rank: Rank) -> list[int]:
    sums: list[int] = rank.kept["exchanging"].checksums()
    return sums


def round_of(ranks: Measured, steps: int) -> tuple[float, float]:
    """Return a round's median step with communication and without, in seconds."""
    times = ranks(time_steps, steps)
    exchanging, silent = (
        statistics.median(benchmark.slowest([of_rank[kind] for of_rank in times]))
        for kind in ("exchanging", "silent")
    )
    return exchanging, silent


def check_equal(sets: dict[str, Measured]) -> dict[str, list[int]]:
    """Return each backend's checksums. Raises BenchmarkError when its ranks' models differ."""
    sums = {}
    for backend, ranks in sets.items():
        first, *others = ranks(checksums)
        if any(other != first for other in others):
            raise BenchmarkError(f"{backend}: the ranks' parameters differ")
        sums[backend] = first
    return sums


def facts(rounds: list[tuple[float, float]]) -> dict[str, Any]:
    """Return a backend's figures, in seconds."""
    exposed = [exchanging - silent for exchanging, silent in rounds]
    spreads = {
        "step": report.Spread.of([exchanging for exchanging, _ in rounds]),
        "silent_step": report.Spread.of([silent for _, silent in rounds]),
        "exposed": report.Spread.of(exposed),
    }
    figures: dict[str, Any] = {"rounds_s": rounds}
    for what, spread in spreads.items():
        figures |= {
            f"{what}_median_s": spread.median,
            f"{what}_low_s": spread.low,
            f"{what}_high_s": spread.high,
        }
    return figures


def print_facts(backends: dict[str, dict[str, Any]], markdown: bool) -> None:
    head = ["backend"]
    for what in ("step ms", "same without communication", "exposed ms"):
        head += [what, "[rounds]"]
    rows = []
    for backend, figures in backends.items():
        row = [backend]
        for what in ("step", "silent_step", "exposed"):
            median, low, high = (1e3 * figures[f"{what}_{e}_s"] for e in ("median", "low", "high"))
            row += [f"{median:.1f}", f"[{low:.1f}-{high:.1f}]"]
        rows.append(row)
    report.print_table(head, rows, markdown)


def ratios(backends: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return each backend's exposed communication as a share of Gloo's."""
    if "gloo" not in backends:
        return {}
    gloo = backends["gloo"]["exposed_median_s"]
    return {
        backend: figures["exposed_median_s"] / gloo
        for backend, figures in backends.items()
        if backend != "gloo"
    }


def measure(options: argparse.Namespace) -> tuple[int, dict[str, Any], dict[str, list[int]]]:
    """Return the number of parameters, every backend's figures, and the models' checksums."""
    sizes = (options.width, options.layers, options.batch)
    with contextlib.ExitStack() as stack:
        sets = {
            backend: stack.enter_context(Measured(options.ranks, backend, options.deadline))
            for backend in options.backends
        }
        parameters = 0
        for ranks in sets.values():
            ranks(benchmark.prepare)
            ranks(benchmark.join)
            parameters = ranks(build, sizes)[0]
        rounds: dict[str, list[tuple[float, float]]] = {backend: [] for backend in sets}
        for number in range(options.rounds):
            report.progress(f"round {number + 1} ")
            for backend, ranks in sets.items():
                rounds[backend].append(round_of(ranks, options.steps))
        report.progress("")
        sums = check_equal(sets)
    return parameters, {backend: facts(figures) for backend, figures in rounds.items()}, sums


def run(options: argparse.Namespace) -> None:
    machine = report.machine()
    parameters, backends, sums = measure(options)
    equal = len({tuple(some) for some in sums.values()}) == 1 if len(sums) > 1 else None
    print(
        f"DDP, {parameters / 1e6:.1f} M float32 parameters, {options.ranks} ranks, batch "
        f"{options.batch}: median [lowest-highest] of {options.rounds} rounds of "
        f"{options.steps} steps\n"
    )
    print_facts(backends, options.markdown)
    shares = ratios(backends)
    for backend, share in shares.items():
        print(f"exposed communication: {backend} has {share:.3f} of Gloo's")
    if equal is not None:
        print(f"parameters after training: {'bitwise equal' if equal else 'differ'}")
    body = {
        "machine": machine,
        "parameters": parameters,
        "options": {key: getattr(options, key) for key in ("ranks", "batch", "rounds", "steps")},
        "backends": backends,
        "exposed_vs_gloo": shares,
        "parameters_equal": equal,
    }
    report.write_json(options.json, "ddp_step", body)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=2)
    add("--batch", type=report.positive, default=64, help="examples a rank and step")
    add("--width", type=report.positive, default=2048, help="of each layer")
    add("--layers", type=report.positive, default=6)
    add("--backends", type=report.list_of(str), default="ringcomm,gloo")
    add("--rounds", type=report.positive, default=5)
    add("--steps", type=report.positive, default=10, help="a round, of each kind")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(benchmark.main(run, parse()))
