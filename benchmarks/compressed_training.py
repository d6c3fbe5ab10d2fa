"""Loss against steps: the same trainings with gradients in fp32 and in fewer bytes.

    python benchmarks/compressed_training.py
    python benchmarks/compressed_training.py --seeds 3 --json c.json --plot c.png

Stock DistributedDataParallel trains the CNN of examples/train_digits.py, and the transformer of
examples/diloco.py on its letters, with the hook of ringcomm.compression. The ranks are of this host
and quantise all the same. With a seed, all trainings begin alike and see the same data in the same
order, so a loss is compared with that of fp32 at the same step. It measures losses, not times.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from lab import ROOT, report
from lab.ranks import Rank, Ranks

WAYS: dict[str, tuple[str, str] | None] = {
    "fp32": None,
    "fp16": ("fp16", "drop"),
    "bf16": ("bf16", "drop"),
    "int8, fed back": ("int8", "feedback"),
    "int8, unbiased": ("int8", "unbiased"),
    "fp8, fed back": ("fp8", "feedback"),
}
MODELS = ["digits CNN", "transformer"]
LAST = 20  # steps, over which the final loss is taken
EXAMPLES = ROOT / "examples"


def losses_of(model: str, seed: int, rank: Rank) -> Any:
    """Return a module, an optimiser's class and a function that gives the loss of a step."""
    import runpy

    import torch

    torch.manual_seed(seed)
    chance = torch.Generator().manual_seed(1000 * seed + rank.index)
    if model == "digits CNN":
        digits = runpy.run_path(str(EXAMPLES / "train_digits.py"))
        images, labels = digits["digits"](seed)[0].tensors

        def loss(network: torch.nn.Module) -> torch.Tensor:
            chosen = torch.randint(len(labels), (32,), generator=chance)
            return torch.nn.functional.cross_entropy(network(images[chosen]), labels[chosen])

        return digits["network"](), 1e-3, loss
    diloco = runpy.run_path(str(EXAMPLES / "diloco.py"))
    letters = (EXAMPLES / "diloco.py").read_bytes()
    text = torch.tensor([byte % diloco["LETTERS"] for byte in letters])
    network = diloco["Model"](64, 2)
    return (
        network,
        2e-3,
        lambda network: diloco["loss_of"](network, diloco["batch"](text, 8, chance)),
    )


def train(rank: Rank, model: str, way: str, seed: int, steps: int) -> list[float]:
    """Return the mean loss of each step over the ranks."""
    import torch
    import torch.distributed as dist

    from ringcomm.compression import hooks

    torch.set_num_threads(1)
    network, rate, loss_of = losses_of(model, seed, rank)
    ddp = torch.nn.parallel.DistributedDataParallel(network)
    kind = WAYS[way]
    state = hooks.register(ddp, kind[0], error=kind[1], seed=seed, flat=True) if kind else None
    optimizer = torch.optim.Adam(ddp.parameters(), lr=rate)
    losses = torch.zeros(steps)
    for step in range(steps):
        loss = loss_of(ddp)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    if state is not None:
        state.close()
    dist.all_reduce(losses)
    mean: list[float] = (losses / rank.size).tolist()
    return mean


def smoothed(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, i + 1 - LAST) : i + 1]) for i in range(len(losses))]


def show(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    rows = []
    for result in results:
        exact = [smoothed(losses)[-1] for losses in result["losses"]["fp32"]]
        for way, some in result["losses"].items():
            final = [smoothed(losses)[-1] for losses in some]
            apart = [loss - other for loss, other in zip(final, exact, strict=True)]
            row = [result["model"], way, f"{statistics.fmean(final):.4f}"]
            row += [f"{min(final):.4f} to {max(final):.4f}"]
            rows.append([*row, f"{min(apart):+.4f} to {max(apart):+.4f}"])
    print(f"{options.ranks} ranks, {options.seeds} seeds; mean loss of the last {LAST} steps\n")
    head = ["model", "gradients", "final loss", "seeds", "beside fp32, the same seed"]
    report.print_table(head, rows, options.markdown)


def draw(results: list[dict[str, Any]], path: Path, title: str) -> None:
    """Write a picture: losses above, and below how far they are from those of fp32."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    from plot import STYLE, save  # which chooses how matplotlib draws

    from ringcomm.tools.page import COLORS

    colors = ["#000000", *COLORS]
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, len(results), figsize=(10, 6.4), squeeze=False, layout="constrained"
        )
        for column, result in enumerate(results):
            curves = {
                way: [smoothed(curve) for curve in some] for way, some in result["losses"].items()
            }
            above, below = axes[0][column], axes[1][column]
            for (way, some), color in zip(curves.items(), colors, strict=False):
                by_step = list(zip(*some, strict=True))
                steps = range(1, len(by_step) + 1)
                width = 3.0 if way == "fp32" else 1.2
                middle = [statistics.fmean(step) for step in by_step]
                above.plot(steps, middle, color=color, label=way, linewidth=width,
                           alpha=0.35 if way == "fp32" else 1)  # fmt: skip
                apart = [
                    [a - b for a, b in zip(curve, exact, strict=True)]
                    for curve, exact in zip(some, curves["fp32"], strict=True)
                ]
                if way == "fp32":
                    continue
                steps_apart = list(zip(*apart, strict=True))
                below.plot(steps, [statistics.fmean(step) for step in steps_apart], color=color,
                           linewidth=1.2)  # fmt: skip
                below.fill_between(steps, [min(step) for step in steps_apart],
                                   [max(step) for step in steps_apart], color=color, alpha=0.12,
                                   linewidth=0)  # fmt: skip
            exact_by_step = list(zip(*curves["fp32"], strict=True))
            above.fill_between(range(1, len(exact_by_step) + 1), [min(s) for s in exact_by_step],
                               [max(s) for s in exact_by_step], color="#000000", alpha=0.10,
                               linewidth=0, label="seeds of fp32")  # fmt: skip
            above.set(title=result["model"], yscale="log", ylabel="loss")
            above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
            above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            above.yaxis.set_minor_locator(NullLocator())
            below.axhline(0, color="#888888", linewidth=0.8, linestyle=":")
            below.set(xlabel="step", ylabel="loss above that of fp32")
        axes[0][0].legend(frameon=False)
        save(figure, path, title)


def main() -> None:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=report.positive, default=2)
    add("--seeds", type=report.positive, default=3)
    add("--steps", type=report.positive, default=250)
    add("--models", type=report.list_of(str), default=",".join(MODELS), help=f"of {MODELS}")
    add("--plot", type=Path, metavar="FILE", help="draw the curves; needs matplotlib")
    options = parser.parse_args()
    machine, results, some = report.machine(), [], Ranks(options.ranks)
    for model in options.models:
        losses: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for seed in range(options.seeds):
            for way in WAYS:
                report.progress(f"{model}, {way}, seed {seed} ")
                answers = some(train, model, way, seed, options.steps, seconds=options.deadline)
                losses[way].append([round(loss, 5) for loss in answers[0]])
        results.append({"model": model, "losses": losses})
    some.leave()
    report.progress("")
    show(results, options)
    rows = [
        {way: [" ".join(map(str, run)) for run in some] for way, some in result["losses"].items()}
        for result in results
    ]  # a line a training
    body = {"machine": machine, "ranks": options.ranks, "steps": options.steps}
    body["results"] = [
        {"model": result["model"], "losses": row} for result, row in zip(results, rows, strict=True)
    ]
    report.write_json(options.json, "compressed_training", body)
    if options.plot:
        title = f"{options.ranks} ranks, Adam; means of {LAST} steps and {options.seeds} seeds; "
        title += f"bands: lowest to highest seed; torch {machine['torch']}"
        draw(results, options.plot, title)


if __name__ == "__main__":
    main()
