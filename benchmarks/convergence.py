"""Loss against seconds: the same training over ringcomm and over Gloo, hosts linked at 1 Gbit/s.

    python benchmarks/convergence.py
    python benchmarks/convergence.py --hosts 4 --local 1 --json c.json --plot c.png

Stock DistributedDataParallel trains MLPs on scikit-learn's digits; hosts are network namespaces, so
it needs root. Both backends are in the same processes and take turns, a whole training each; all
begin with the same parameters and see the same images in the same order. Two ranks reach the same
losses to the bit, since a + b is b + a; more ranks reach them within rounding, which is checked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from lab import benchmark, report
from lab.hosts import Hosts
from lab.namespaces import missing

BACKENDS = ["ringcomm", "gloo"]
MODELS = {"small": [64, 128, 128, 10], "large": [64, 2048, 2048, 10]}  # widths
SHARE = {"small": 5, "large": 1}  # steps of each, over --steps
BATCH = 64  # images a step, on all ranks together
SMOOTHED = 10  # steps over which a loss is averaged before it is compared with --loss
ROUNDING = 1e-2  # relative: so much the order of additions may change a loss in a training


# ---- a rank


def train(
    widths: list[int], group: Any, steps: int, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Return this rank's loss at each step, and the seconds from the beginning to its end."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)
    torch.manual_seed(options.seed)
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    network = nn.Sequential(*itertools.chain.from_iterable(layers))[:-1]
    model = nn.parallel.DistributedDataParallel(network, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    order = torch.Generator().manual_seed(options.seed)
    losses, times = [], []
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(steps):
        batch = torch.randint(len(labels), (BATCH,), generator=order)
        mine = batch[dist.get_rank() :: dist.get_world_size()]
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(round(time.perf_counter() - began, 6))
    return losses, times


def be_rank(options: argparse.Namespace) -> None:
    """Train every model over both backends in turn; rank 0 prints what all measured."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    groups = {"gloo": dist.group.WORLD, "ringcomm": dist.new_group(backend="ringcomm")}
    answer = []
    for name in options.models:
        steps = options.steps * SHARE[name]
        rounds: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
        for number in range(options.rounds):
            for backend in BACKENDS[:: -1 if number % 2 else 1]:
                losses, times = train(MODELS[name], groups[backend], steps, options)
                everybody: list[Any] = [None] * world
                dist.all_gather_object(everybody, losses)
                means = [statistics.fmean(step) for step in zip(*everybody, strict=True)]
                rounds[backend].append({"losses": means, "seconds": times})
        answer.append({"model": name, "rounds": rounds})
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ---- what it means


def smoothed(losses: list[float]) -> list[float]:
    """Return the mean of each step's loss and those before it, SMOOTHED at most."""
    return [statistics.fmean(losses[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(losses))]


def compare(rounds: dict[str, list[dict[str, Any]]], ranks: int) -> dict[str, Any]:
    """Return how far the losses of all trainings are apart. Raises SystemExit when too far."""
    some = [training["losses"] for backend in BACKENDS for training in rounds[backend]]
    first = some[0]
    apart = max(
        abs(a - b) / max(abs(b), 1e-6)
        for other in some[1:]
        for a, b in zip(other, first, strict=True)
    )
    allowed = 0.0 if ranks == 2 else ROUNDING
    if apart > allowed:
        raise SystemExit(f"losses differ by {apart:.2g}, which is more than {allowed:g}")
    return {"equal_to_the_bit": apart == 0, "largest_relative_difference": apart}


def summary(trained: dict[str, Any], hosts: int, local: int, target: float) -> dict[str, Any]:
    """Return seconds to the loss and steps a second of each backend, and the ratio of seconds."""
    rounds, widths = trained["rounds"], MODELS[trained["model"]]
    curve = smoothed(rounds["gloo"][0]["losses"])
    step = next((i for i, loss in enumerate(curve) if loss <= target), len(curve) - 1)
    figures: dict[str, Any] = {
        "model": trained["model"],
        "hosts": hosts,
        "local": local,
        "parameters": sum(a * b + b for a, b in itertools.pairwise(widths)),
        "target": curve[step] if curve[step] > target else target,
        "target_step": step + 1,
        **compare(rounds, hosts * local),
    }
    for backend in BACKENDS:
        reached = report.Spread.of([training["seconds"][step] for training in rounds[backend]])
        rates = [len(curve) / training["seconds"][-1] for training in rounds[backend]]
        rate = report.Spread.of(rates)
        figures[backend] = {
            "seconds_to_target": reached.__dict__,
            "steps_per_s": rate.__dict__,
            "final_loss": smoothed(rounds[backend][0]["losses"])[-1],
        }
    medians = [figures[backend]["seconds_to_target"]["median"] for backend in BACKENDS]
    return figures | {"ratio": medians[1] / medians[0], "rounds": rounds}


def show(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    head = ["model", "parameters", "hosts x ranks", "loss", "at step"]
    for backend in BACKENDS:
        head += [f"{backend} s", "[rounds]", "steps/s"]
    rows = []
    for result in results:
        row = [result["model"], f"{result['parameters']:,}"]
        row += [f"{result['hosts']} x {result['local']}", f"{result['target']:.3g}"]
        row.append(str(result["target_step"]))
        for backend in BACKENDS:
            spread = result[backend]["seconds_to_target"]
            row += [f"{spread['median']:.3g}", f"[{spread['low']:.3g}-{spread['high']:.3g}]"]
            row.append(f"{result[backend]['steps_per_s']['median']:.3g}")
        equal = "bitwise" if result["equal_to_the_bit"] else "within rounding"
        rows.append([*row, f"{result['ratio']:.2f}", equal])
    print(f"links of {options.rate or 'no limit'}, median [lowest-highest] of {options.rounds}\n")
    report.print_table([*head, "ratio", "losses equal"], rows, options.markdown)


def draw(results: list[dict[str, Any]], path: Path, title: str) -> None:
    """Write a picture with a panel a result: the loss against seconds of each backend."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    from plot import STYLE, TIMES, save  # which chooses how matplotlib draws

    from ringcomm.tools.page import COLORS

    with mpl.rc_context(STYLE):
        columns = min(2, len(results))
        lines = -(-len(results) // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(5 * columns, 0.7 + 2.8 * lines), squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for panel, result in itertools.zip_longest(axes.flat, results):
            if result is None:
                panel.set_axis_off()
                continue
            for backend, color in zip(BACKENDS, COLORS, strict=False):
                trainings = result["rounds"][backend]
                loss = smoothed(trainings[0]["losses"])
                by_step = list(zip(*(training["seconds"] for training in trainings), strict=True))
                low, high = [min(step) for step in by_step], [max(step) for step in by_step]
                panel.fill_betweenx(loss, low, high, color=color, alpha=0.15, linewidth=0)
                middle = [statistics.median(step) for step in by_step]
                panel.plot(middle, loss, color=color, label=backend, linewidth=1.6)
            panel.axhline(result["target"], color="#888888", linewidth=0.8, linestyle=":")
            many = "s" if result["local"] > 1 else ""
            ranks = f"{result['hosts']} hosts {TIMES} {result['local']} rank{many}"
            size = f"{result['parameters']:,} parameters"
            panel.set(title=f"{size}, {ranks}: {result['ratio']:.2f}{TIMES}", yscale="log")
            panel.set(xlabel="seconds", ylabel="loss", xlim=(0, None))
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            panel.yaxis.set_minor_locator(NullLocator())
        axes[0][0].legend(frameon=False)
        save(figure, path, title)


def run(options: argparse.Namespace) -> None:
    machine, results = report.machine(), []
    for count, local in itertools.product(options.hosts, options.local):
        report.progress(f"{count} hosts of {local} ")
        with Hosts(count, rate=options.rate or None) as hosts:
            some = benchmark.ask_ranks(hosts, __file__, local, seconds=options.deadline)
        results += [summary(trained, count, local, options.loss) for trained in some]
    report.progress("")
    show(results, options)
    body = {"machine": machine, "rate": options.rate, "seed": options.seed, "batch": BATCH}
    report.write_json(options.json, "convergence", body | {"results": results})
    if options.plot:
        facts = f"links of {options.rate or 'no limit'}, hosts are network namespaces on "
        facts += f"{machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}\n"
        facts += f"lines: median of {options.rounds} trainings, mean loss of {SMOOTHED} steps; "
        facts += "bands: fastest to slowest; dotted: where the ratio of times is taken"
        draw(results, options.plot, facts)


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    add, numbers = parser.add_argument, report.list_of(report.positive)
    add("--hosts", type=numbers, default="2", help="how many, in turn")
    add("--local", type=numbers, default="1,2", help="ranks on each host, in turn")
    add("--rate", default="1gbit", help="of each link; empty: as fast as it goes")
    add("--models", type=report.list_of(str), default=",".join(MODELS), help=f"of {[*MODELS]}")
    add("--steps", type=report.positive, default=30, help="of the large model")
    add("--loss", type=float, default=0.3, help="that is to be reached")
    add("--rounds", type=report.positive, default=3)
    add("--seed", type=int, default=0)
    add("--plot", type=Path, metavar="FILE", help="draw the curves; needs matplotlib")
    add("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.as_rank:
        be_rank(options)
    elif reason := missing():
        sys.exit(reason)
    else:
        run(options)


if __name__ == "__main__":
    main()
