"""`ringcomm model`: how long a collective takes in large groups, by costs.py."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ringcomm._network import costs, costs_file
from ringcomm._network.costs import Costs, Fabrics
from ringcomm._text import ranks, show_rate, show_seconds, show_size, sizes

COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"]  # told apart by everybody

Times = dict[str, dict[int, float]]  # seconds, by algorithm and ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--collective", choices=list(costs.ALGORITHMS), default="all_reduce")
    add("--bytes", type=sizes, default="1K,1M,64M", help="whole messages")
    add("--ranks", type=ranks, default="2..4096", help="2..4096 are powers of two; or 3,5,8")
    add("--local", type=int, default=1, help="ranks of a host")
    add("--costs", type=Path, metavar="FILE", help="what `ringcomm tune` has written")
    add("--plot", type=Path, metavar="FILE", help="draw it as well (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    if options.local < 1:
        raise ValueError(f"--local {options.local}: a host has at least one rank")
    fabrics, source = costs.DEFAULT, "defaults"
    if options.costs:
        fabrics, source = costs_file.read_costs(options.costs), str(options.costs)
    numbers = [n for n in options.ranks if n > 1 and (n <= options.local or n % options.local == 0)]
    if not numbers:
        raise ValueError(f"--ranks: none of them fills hosts of {options.local}")
    print(
        f"{options.collective}, {options.local} ranks a host, a model with the costs of: {source}"
    )
    for name, cost in zip(Fabrics._fields, fabrics, strict=True):
        print(f"  {name}: {describe(cost)}")
    tables = {}
    for size in options.bytes:
        tables[size] = times_of(options.collective, size, numbers, options.local, fabrics)
        print_table(size, numbers, tables[size])
    if options.plot:
        draw(options, tables, fabrics, options.plot)
    return 0


def times_of(collective: str, size: int, numbers: list[int], local: int, fabrics: Fabrics) -> Times:
    names = [name for name in costs.ALGORITHMS[collective] if name != "direct"]
    if local == 1 and "hierarchical" in names:
        names.remove("hierarchical")
    found: Times = {}
    for name in names:
        found[name] = {
            n: costs.seconds(collective, name, size, max(1, n // local), min(n, local), fabrics)
            for n in numbers
            if is_run(collective, name, max(1, n // local), min(n, local))
        }
    return {name: times for name, times in found.items() if times}


def is_run(collective: str, name: str, hosts: int, local: int) -> bool:
    """Tell whether the library takes the algorithm for so many ranks."""
    few_hosts = hosts <= costs.FEW and hosts * local <= costs.FEW_RANKS
    if collective == "reduce_scatter" and name == "hierarchical":
        return few_hosts
    return hosts * local <= costs.FEW or name != "pairwise"


def print_table(size: int, numbers: list[int], table: Times) -> None:
    print(f"\n{show_size(size):>6} " + "".join(f"{name:>14}" for name in table))
    for n in numbers:
        fastest = min(times[n] for times in table.values() if n in times)
        words = [
            f"{show_seconds(times[n])}{' *' if times[n] == fastest else '  '}"
            if n in times
            else "-  "
            for times in table.values()
        ]
        print(f"{n:>6} " + "".join(f"{word:>14}" for word in words))


def describe(cost: Costs) -> str:
    return (
        f"{show_seconds(cost.alpha)} a message, {show_rate(1 / cost.beta)} sent, "
        f"{show_rate(1 / cost.gamma)} added up"
    )


def draw(
    options: argparse.Namespace, tables: dict[int, Times], fabrics: Fabrics, path: Path
) -> None:
    """Write a picture with a panel a size: time against ranks, both logarithmic."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    style: dict[str, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    style |= {"axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6}
    style |= {"axes.edgecolor": "#888888", "xtick.color": "#555555", "ytick.color": "#555555"}
    with mpl.rc_context(style):
        width = 0.9 + 3.2 * len(tables)
        figure, rows = plt.subplots(
            1, len(tables), figsize=(width, 3.4), squeeze=False, layout="constrained"
        )
        for axes, (size, table) in zip(rows[0], tables.items(), strict=True):
            for colour, (name, times) in zip(COLOURS, table.items(), strict=False):
                axes.plot(times.keys(), times.values(), color=colour, label=name, linewidth=1.6)
            axes.set(yscale="log", xlabel="ranks", title=show_size(size))
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(list(times)[::-3]))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: show_seconds(value)))
        rows[0][0].set_ylabel(f"{options.collective}, time by the model")
        rows[0][0].legend(frameon=False)
        lines = [f"{n}: {describe(c)}" for n, c in zip(Fabrics._fields, fabrics, strict=True)]
        figure.suptitle(
            f"a model, not a measurement; {options.local} ranks a host\n" + "; ".join(lines),
            fontsize=8,
            color="#555555",
        )
        figure.savefig(path, dpi=150)
        plt.close(figure)
