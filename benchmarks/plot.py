"""Draw what `ringcomm bench` measured: time and bus bandwidth against size.

python benchmarks/plot.py FILE.json FILE.png      draws what `ringcomm bench --json` wrote
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

from ringcomm._text import show_seconds, show_size
from ringcomm.tools.bench import collectives
from ringcomm.tools.bench.traits import IN_PLACE
from ringcomm.tools.page import COLORS

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

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


def save(figure: Any, path: Path, title: str) -> None:
    """Write the picture, with what must be known of it above."""
    figure.suptitle(title, fontsize=9, color="#555555")
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
        for (left, right), (name, some) in zip(axes, rows.items(), strict=True):
            curves(left, some, bandwidth=False)
            left.set(yscale="log", ylabel="time a call", title=f"{name}: time")
            left.set_ylim(min(sample["low_s"] for sample in some) / 3)
            left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_seconds(value)))
            annotate(left, some)
            curves(right, some, bandwidth=True)
            right.set(ylabel="GB/s", title=f"{name}: bus bandwidth")
            right.set_ylim(bottom=0)
        axes[0][0].legend(frameon=False, loc="upper left")
        save(figure, path, title(body))


def title(body: dict[str, Any]) -> str:
    machine, options = body["machine"], body["options"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}, tensors on {options['device']}, "
        f"torch {machine['torch']}, {machine['date'][:10]}\n"
        f"lines: median of {options['rounds']} rounds, slowest rank; bands: lowest to highest "
        f"round; n{TIMES}: Gloo's time divided by it"
    )


def curves(axes: Any, samples: Samples, *, bandwidth: bool) -> None:
    """Draw a curve with its band for each backend, idle and with busy cores, against size."""
    backends = list(dict.fromkeys(sample["backend"] for sample in samples))
    for loaded in sorted({sample["loaded"] for sample in samples}):
        for backend, color in zip(backends, COLORS, strict=False):
            some = [s for s in samples if (s["backend"], s["loaded"]) == (backend, loaded)]
            some.sort(key=lambda sample: sample["bytes"])
            sizes = [sample["bytes"] for sample in some]
            low, middle, high = (
                [
                    s["busbw_gb_per_s"] * s["median_s"] / s[end] if bandwidth else s[end]
                    for s in some
                ]
                for end in ("low_s", "median_s", "high_s")
            )
            axes.fill_between(sizes, low, high, color=color, alpha=0.15, linewidth=0)
            label = f"{backend}, cores busy" if loaded else backend
            look = "o--" if loaded else "o-"
            axes.plot(sizes, middle, look, color=color, label=label, ms=3.5, lw=1.6)
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
            color=COLORS[0],
        )


def main(words: list[str]) -> int:
    """Draw a file; returns the exit status."""
    if len(words) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        body = json.loads(Path(words[0]).read_text(encoding="utf-8"))
        if body["benchmark"] != collectives.NAME:
            raise ValueError(f"{words[0]} is of another benchmark, {body['benchmark']!r}")
        draw(body, Path(words[1]))
    except (KeyError, OSError, ValueError) as error:
        print(f"plot.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
