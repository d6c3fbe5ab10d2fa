"""How much of a step of DDP or FSDP2 is communication that nothing hides.

Trains a model, by turns with its gradients exchanged and with communication that does nothing: see
sharing.py. The step minus the step that exchanges nothing is the exposed
communication. The backends take turns too. A step takes as long as on its slowest rank, and the
ranks meet before each.
"""

import argparse
import contextlib
import csv
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ringcomm.tools import load, progress
from ringcomm.tools.bench import measured, sharing, trust
from ringcomm.tools.bench.collectives import enter
from ringcomm.tools.bench.measured import BenchmarkError, Measured
from ringcomm.tools.bench.ranks import Rank
from ringcomm.tools.bench.report import Spread, table_lines
from ringcomm.tools.bench.sharing import Model
from ringcomm.tools.load import Span
from ringcomm.tools.progress import Lines

NAME = "ddp"  # the key in JSON
MODEL = ("model", "wrapper", "width", "layers", "batch")  # options, as Model has them
STEPS = {"step": "step", "silent_step": "without communication", "exposed": "exposed communication"}
Steps = dict[str, list[float]]  # seconds of each step, "exchanging" or "silent"


class Trainer:
    """A model with its optimizer and its data, on one rank."""

    def __init__(self, rank: Rank, what: Model, device: str, *, silent: bool) -> None:
        self.cuda = device == "cuda"
        torch.manual_seed(1)
        self.model = sharing.wrap(what, what.network().to(device), rank, silent=silent)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        torch.manual_seed(100 + rank.index)
        self.data = torch.randn(what.inputs).to(device)
        self.wanted = torch.rand(what.inputs).to(device)

    def step(self) -> float:
        """Train once; returns seconds."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(self.data), self.wanted).backward()
        self.optimizer.step()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def checksums(self) -> list[int]:
        """Return a sum over the bits of each parameter: equal models give equal lists."""
        return [
            int(sharing.whole(parameter).view(torch.int32).sum(dtype=torch.int64))
            for parameter in self.model.parameters()
        ]


def build(rank: Rank, what: Model, device: str) -> int:
    """Make both models and warm them up; returns the number of parameters of each."""
    kinds = {"exchanging": False, "silent": True}
    trainers = {kind: Trainer(rank, what, device, silent=kinds[kind]) for kind in kinds}
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


def round_of(ranks: Measured, steps: int, limit: float) -> tuple[float, float]:
    """Return a round's median step with communication and without, in seconds."""
    times = ranks(time_steps, steps, seconds=limit)
    exchanging, silent = (
        statistics.median(measured.slowest([of_rank[kind] for of_rank in times]))
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


def facts(rounds: list[tuple[float, float]], others: float | None = None) -> dict[str, Any]:
    """Return a backend's figures, in seconds; `others` used that share of the cores."""
    exposed = [exchanging - silent for exchanging, silent in rounds]
    spreads = {
        "step": Spread.of([exchanging for exchanging, _ in rounds]),
        "silent_step": Spread.of([silent for _, silent in rounds]),
        "exposed": Spread.of(exposed),
    }
    figures: dict[str, Any] = {"rounds_s": rounds, "others_share": others}
    figures["doubts"] = trust.doubts(others, spreads["step"])
    for what, spread in spreads.items():
        figures |= {
            f"{what}_median_s": spread.median,
            f"{what}_low_s": spread.low,
            f"{what}_high_s": spread.high,
        }
    return figures


def lines_of(backends: dict[str, dict[str, Any]], markdown: bool) -> list[str]:
    """Return the figures as a table."""
    head = ["backend"]
    for what in STEPS.values():
        head += [f"{what} ms", "lowest..highest"]
    head.append("doubt")
    rows = []
    for backend, figures in backends.items():
        row = [backend]
        for what in STEPS:
            median, low, high = (1e3 * figures[f"{what}_{e}_s"] for e in ("median", "low", "high"))
            row += [f"{median:.1f}", f"{low:.1f}..{high:.1f}"]
        rows.append([*row, ", ".join(figures["doubts"]) or "-"])
    return table_lines(head, rows, markdown)


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


def measure_rounds(
    options: argparse.Namespace, sets: dict[str, Measured], size: int, lines: Lines
) -> tuple[dict[str, list[tuple[float, float]]], Span]:
    """Return each backend's rounds, and what other processes did meanwhile."""

    def once(number: int) -> dict[str, tuple[float, float]]:
        again = number >= options.rounds
        what = f"{options.wrapper.upper()}, {size} ranks, round {number + 1}{' again' * again}"
        lines.step(what, advance=int(not again))
        return {
            backend: round_of(ranks, options.steps, options.limit)
            for backend, ranks in sets.items()
        }

    watch = trust.Watch(sets.values())
    rounds = trust.rounds_of(options.rounds, trust.cores_of(size), watch, once)
    figures = {backend: [some.figures[backend] for some in rounds] for backend in sets}
    return figures, load.together(some.span for some in rounds)


def measure_ranks(options: argparse.Namespace, size: int, lines: Lines) -> dict[str, Any]:
    """Measure with `size` ranks, and say the figures."""
    model = Model(*(getattr(options, name) for name in MODEL))
    with contextlib.ExitStack() as stack:
        sets = {
            backend: stack.enter_context(Measured(size, backend, options.deadline))
            for backend in options.backends
        }
        parameters = 0
        for ranks in sets.values():
            ranks(enter, options.device, seconds=options.limit)
            parameters = ranks(build, model, options.device, seconds=options.limit)[0]
        rounds, span = measure_rounds(options, sets, size, lines)
        sums = check_equal(sets)
    share = span.share(trust.cores_of(size))
    backends = {backend: facts(figures, share) for backend, figures in rounds.items()}
    equal = len({tuple(some) for some in sums.values()}) == 1 if len(sums) > 1 else None
    run = {
        "ranks": size,
        "parameters": parameters,
        "backends": backends,
        "exposed_vs_gloo": ratios(backends),
        "parameters_equal": equal,
        "load": trust.summary([span]),
    }
    say(run, options, lines)
    return run


def say(run: dict[str, Any], options: argparse.Namespace, lines: Lines) -> None:
    lines.say(
        f"{options.wrapper.upper()}, {options.model} of "
        f"{run['parameters'] / 1e6:.1f} M float32 parameters, {run['ranks']} ranks, "
        f"{options.device}, batch {options.batch}: median and lowest..highest of "
        f"{options.rounds} rounds of {options.steps} steps\n"
    )
    for line in lines_of(run["backends"], options.markdown):
        lines.say(line)
    lines.say()
    for backend, share in run["exposed_vs_gloo"].items():
        lines.say(f"exposed communication: {backend} has {share:.3f} of Gloo's")
    if run["parameters_equal"] is not None:
        equal = "bitwise equal" if run["parameters_equal"] else "differ"
        lines.say(f"parameters after training, of the backends: {equal}")
    doubtful = sum(bool(figures["doubts"]) for figures in run["backends"].values())
    lines.say(trust.load_says(run["load"], doubtful, len(run["backends"])))
    lines.say()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what JSON gets. Raises BenchmarkError where ranks end with other parameters."""
    with progress.shown(options.rounds * len(options.ranks)) as lines:
        runs = [measure_ranks(options, size, lines) for size in options.ranks]
    names = ("ranks", *MODEL, "rounds", "steps", "device")
    return {"options": {name: getattr(options, name) for name in names}, "runs": runs}


def write_csv(path: Path, body: dict[str, Any]) -> None:
    """Write a line a number of ranks and backend; times are in milliseconds."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        ends = ("median", "low", "high")
        writer.writerow(["ranks", "backend", *(f"{w}_{e} (ms)" for w in STEPS for e in ends)])
        for run in body["runs"]:
            for backend, figures in run["backends"].items():
                times = [1e3 * figures[f"{what}_{end}_s"] for what in STEPS for end in ends]
                writer.writerow([run["ranks"], backend, *times])
