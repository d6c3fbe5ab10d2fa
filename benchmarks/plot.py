"""Draw what `ringcomm bench` measured: time and bus bandwidth against size.

python benchmarks/plot.py FILE.json FILE.png      draws what `ringcomm bench --json` wrote
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from ringcomm._text import show_seconds, show_size
from ringcomm.tools.bench import collectives, ddp, earlier
from ringcomm.tools.bench.cases import IN_PLACE

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"]  # told apart by everybody
TIMES = "\N{MULTIPLICATION SIGN}"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#888888",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}

Samples = list[dict[str, Any]]


def draw(body: dict[str, Any], path: Path) -> None:
    """Write a picture with a row a collective; `body` is what `ringcomm bench` puts into JSON."""
    rows: dict[str, Samples] = {}
    for sample in body["samples"]:
        usual = sample["in_place"] == IN_PLACE[sample["collective"]][0]
        if sample["bytes"] > 0 and usual and not sample["refused"]:
            op = "" if sample["redop"] == "none" else f" {sample['redop']}"
            name = f"{sample['collective']}{op}, {sample['type']}, {sample['ranks']} ranks"
            rows.setdefault(name, Samples()).append(sample)
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(rows), 2, figsize=(10, 0.9 + 3.1 * len(rows)), squeeze=False, layout="constrained"
        )
        for (left, right), name in zip(axes, rows, strict=True):
            some = rows[name]
            draw_times(left, some, name)
            draw_bandwidths(right, some, name)
        axes[0][0].legend(frameon=False, loc="upper left")
        figure.suptitle(title(body), fontsize=9, color="#555555")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def title(body: dict[str, Any]) -> str:
    machine, options = body["machine"], body["options"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, tensors on {options['device']}, "
        f"torch {machine['torch']}, {machine['date'][:10]}\n"
        f"lines: median of {options['rounds']} rounds, slowest rank; bands: lowest to highest "
        f"round; n{TIMES}: Gloo's time divided by it"
    )


def draw_times(axes: Any, samples: Samples, name: str) -> None:
    """Draw time a call against size, both logarithmic, and how far apart the backends are."""
    for label, colour, dashed, some in curves(samples):
        line(axes, some, "time", (label, colour, dashed))
    axes.set(yscale="log", ylabel="time a call", title=f"{name}: time")
    axes.set_ylim(min(sample["low_s"] for sample in samples) / 3)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_seconds(value)))
    size_axis(axes, samples)
    annotate(axes, samples)


def draw_bandwidths(axes: Any, samples: Samples, name: str) -> None:
    """Draw bus bandwidth against size."""
    for label, colour, dashed, some in curves(samples):
        line(axes, some, "bandwidth", (label, colour, dashed))
    axes.set(ylabel="GB/s", title=f"{name}: bus bandwidth")
    axes.set_ylim(bottom=0)
    size_axis(axes, samples)


def curves(samples: Samples) -> list[tuple[str, str, bool, Samples]]:
    """Return (label, colour, dashed, samples by size) of each backend, idle then loaded."""
    backends = list(dict.fromkeys(sample["backend"] for sample in samples))
    found = []
    for loaded in (False, True):
        for backend, colour in zip(backends, COLOURS, strict=False):
            some = [s for s in samples if s["backend"] == backend and s["loaded"] == loaded]
            if some:
                label = f"{backend}, cores busy" if loaded else backend
                found.append((label, colour, loaded, sorted(some, key=lambda s: s["bytes"])))
    return found


def line(axes: Any, samples: Samples, what: str, look: tuple[str, str, bool]) -> None:
    """Draw one curve with its band: "time" in seconds, or "bandwidth" in GB/s."""
    label, colour, dashed = look
    sizes = [sample["bytes"] for sample in samples]
    middle, low, high = ([at(s, end, what) for s in samples] for end in ("median", "low", "high"))
    axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(
        sizes,
        middle,
        color=colour,
        label=label,
        linestyle="--" if dashed else "-",
        marker="o",
        markersize=3.5,
        linewidth=1.6,
        alpha=0.75 if dashed else 1,
    )


def at(sample: dict[str, Any], end: str, what: str) -> float:
    """Return the time, or the bandwidth at that time; `end` is median, low or high."""
    seconds: float = sample[f"{end}_s"]
    if what == "time":
        return seconds
    bandwidth: float = sample["busbw_gb_per_s"] * sample["median_s"] / seconds
    return bandwidth


def size_axis(axes: Any, samples: Samples) -> None:
    sizes = sorted({sample["bytes"] for sample in samples})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes[:: -(-len(sizes) // 12)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_size(int(value))))
    axes.set_xlabel("bytes")


def annotate(axes: Any, samples: Samples) -> None:
    """Write under the first other backend's curve how many times faster than Gloo it is."""
    idle = [sample for sample in samples if not sample["loaded"]]
    gloo = {sample["bytes"]: sample for sample in idle if sample["backend"] == "gloo"}
    others = [sample for sample in idle if sample["backend"] != "gloo"]
    for sample in others:
        if sample["backend"] != others[0]["backend"] or sample["bytes"] not in gloo:
            continue
        ratio = gloo[sample["bytes"]]["median_s"] / sample["median_s"]
        axes.annotate(
            f"{ratio:.{0 if ratio >= 10 else 1}f}{TIMES}",
            (sample["bytes"], sample["low_s"]),
            xytext=(5, -11),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=COLOURS[0],
        )


def main(words: list[str]) -> int:
    """Draw a file; returns the exit status."""
    if len(words) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        body = earlier.read([Path(words[0])])
        if body["benchmark"] != collectives.NAME:
            raise ValueError(
                f"{words[0]} has steps of {ddp.NAME}: `ringcomm bench --from` draws it"
            )
        draw(body, Path(words[1]))
    except (OSError, ValueError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
