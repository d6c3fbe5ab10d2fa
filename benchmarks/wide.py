"""The cost of a rank of a large group: memory, descriptors, connections, requests at the store.

    python benchmarks/wide.py --json FILE --plot FILE.png

Up to 256 ranks without torch (tests/cpp/comm/wide.cc) in network namespaces, eight to a host. They
share the cores, so times tell of this machine. `ringcomm plan simulate` is held against them all
the same: alpha and beta of its network come from two ranks on two hosts, those of its memory from
two ranks on one. `--key before` puts the figures of an older build beside those that the file has;
numbers of ranks that are not measured keep the figures that they have.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from lab import ROOT, report, wide
from lab.hosts import Hosts
from lab.namespaces import missing
from lab.simulated_plans import NOTHING, seconds
from ringcomm._network.costs import DEFAULT, Costs, Fabrics

LOCAL = 8  # ranks of a host, where there are more than so many
SIZES = [8, 4096, 262144]
TRIES = 5  # for each measurement that the model's costs come from
# The same peers for every size and root; then those that talk to all.
SPARSE = "all_reduce,reduce_scatter,all_gather,broadcast,reduce,barrier"
DENSE = "scatter,gather,all_to_all,messages"
FIGURES = ["pss_bytes", "vm_bytes", "descriptors", "connections", "requests", "store_bytes"]
PANELS = {
    "pss_bytes": ("memory of a rank", "MiB", 1 << 20),
    "vm_bytes": ("address space of a rank", "MiB", 1 << 20),
    "descriptors": ("descriptors of a rank", "", 1),
    "connections": ("TCP connections of a rank", "", 1),
    "requests": ("requests of a rank at the store", "", 1),
    "meeting_s": ("meeting", "s", 1),
}

Row = dict[str, Any]


def layout(ranks: int) -> tuple[int, int]:
    """Return hosts and ranks of each: one each up to LOCAL, so that they have to connect."""
    return (ranks, 1) if ranks <= LOCAL else (ranks // LOCAL, LOCAL)


def measure(hosts: Hosts | None, ranks: int, options: argparse.Namespace, only: str) -> Row:
    """Return the figures of one run: the most of all ranks, less what the program had before."""
    local = ranks // hosts.count if hosts else 1
    sizes = ",".join(map(str, SIZES))
    words = ["--only", only, "--sizes", sizes, "--calls", options.calls]
    words += ["--timeout", options.patience / 2, "--deadline", options.patience]
    answer = wide.run(
        options.program, *words, hosts=hosts, local=local, ranks=ranks, seconds=options.patience
    )
    start, meeting = answer.stage("start"), answer.stage("meeting")
    row: Row = {"meeting_s": meeting["seconds"], "failed": [], "stages": []}
    if not answer.ok:
        row["failed"] = sorted({error["text"][:300] for error in answer.errors})[:3]
    for stage in answer.body["stages"][1:]:
        figures = {name: stage[name]["most"] - start[name]["most"] for name in FIGURES}
        named = {name: stage[name] for name in ("name", "algorithm", "seconds")}
        row["stages"].append({**named, **figures})
    return row


def measure_all(options: argparse.Namespace) -> list[Row]:
    rows = []
    for ranks in options.ranks:
        count, local = layout(ranks)
        report.progress(f"{ranks} ranks ")
        with Hosts(count) as hosts:
            sparse = measure(hosts, ranks, options, SPARSE)
            dense = measure(hosts, ranks, options, DENSE)
        rows.append(
            {"ranks": ranks, "hosts": count, "local": local, "sparse": sparse, "dense": dense}
        )
        report.progress("")
        show(rows[-1:], len(rows) == 1)
    return rows


def show(rows: list[Row], first: bool) -> None:
    heads = ["ranks", "plans", "meeting s", "MiB", "MiB mapped", "descriptors", "connections"]
    heads += ["requests", "failed"]
    if first:
        print(" ".join(f"{head:>12}" for head in heads))
    for row in rows:
        for plans in ("sparse", "dense"):
            last = row[plans]["stages"][-1]
            cells = [row["ranks"], plans, f"{row[plans]['meeting_s']:.3f}"]
            cells += [f"{last[name] / (1 << 20):.1f}" for name in ("pss_bytes", "vm_bytes")]
            cells += [last[name] for name in ("descriptors", "connections", "requests")]
            cells.append("yes" if row[plans]["failed"] else "")
            print(" ".join(f"{cell:>12}" for cell in cells), flush=True)


# ---- the model


def times(row: Row) -> dict[int, tuple[str, float]]:
    """Return algorithm and seconds of an all_reduce, by bytes."""
    by_size = {}
    for stage in row["stages"]:
        name, _, size = stage["name"].partition("/")
        if name == "all_reduce":
            by_size[int(size)] = stage["algorithm"], stage["seconds"]
    return by_size


def fastest(tries: list[dict[int, tuple[str, float]]]) -> dict[int, tuple[str, float]]:
    """Return the fastest of some measurements: what else runs makes them slower, never faster."""
    return {size: min((t[size] for t in tries), key=lambda pair: pair[1]) for size in tries[0]}


def fitted(measured: dict[int, tuple[str, float]], memory: bool) -> Costs:
    """Return the costs by which two ranks take the least and the largest message so long."""
    rounds: dict[int, float] = {}
    sent: dict[int, float] = {}
    added: dict[int, float] = {}
    for size, (algorithm, _) in measured.items():
        hosts = 1 if memory and algorithm == "direct" else 2
        for units, cost in ((rounds, "alpha"), (sent, "beta"), (added, "gamma")):
            unit = NOTHING._replace(**{cost: 1.0})
            units[size] = seconds("all_reduce", algorithm, size, 2, hosts, unit, unit)
    least, most = min(measured), max(measured)
    gamma = DEFAULT.memory.gamma
    alpha = measured[least][1] / rounds[least]
    rest = measured[most][1] - rounds[most] * alpha - added[most] * gamma
    return Costs(alpha, max(rest, 0) / sent[most], gamma)


def hold_model(rows: list[Row], options: argparse.Namespace) -> dict[str, Any]:
    """Return the model's seconds of an all_reduce beside those measured.

    `crowded_s` is the model's where ranks take turns on the cores, and their work is all there is.
    """
    with Hosts(2) as hosts:
        pair = fastest([times(measure(hosts, 2, options, "all_reduce")) for _ in range(TRIES)])
    here = fastest([times(measure(None, 2, options, "all_reduce")) for _ in range(TRIES)])
    fabrics = Fabrics(fitted(here, True), fitted(pair, False))
    held = []
    for row in rows:
        for size, (algorithm, took) in times(row["sparse"]).items():
            ranks, hosts = row["ranks"], row["hosts"]
            network, memory = fabrics.network, fabrics.memory
            try:
                model = seconds("all_reduce", algorithm, size, ranks, hosts, network, memory)
            except ValueError:
                continue
            crowded = model * max(1, row["ranks"] / (options.cores or 1))
            held.append(
                {
                    "ranks": row["ranks"],
                    "bytes": size,
                    "algorithm": algorithm,
                    "measured_s": took,
                    "model_s": model,
                    "crowded_s": crowded,
                }
            )
    print(f"\nmodel with memory {fabrics.memory}, network {fabrics.network}")
    for case in held:
        print(
            f"{case['ranks']:6} ranks {case['bytes']:8} B {case['algorithm']:14}"
            f" measured {1e3 * case['measured_s']:10.3f} ms  model {1e3 * case['model_s']:10.3f} ms"
            f"  on {options.cores} cores {1e3 * case['crowded_s']:10.3f} ms"
            f"  ratio {case['measured_s'] / case['crowded_s']:.2f}"
        )
    names = ("memory", "network")
    return {
        "costs": {name: fabric._asdict() for name, fabric in zip(names, fabrics, strict=True)},
        "costs_from": f"all_reduces of the least and the largest size, two ranks on two hosts, and "
        f"on one, the fastest of {TRIES}; gamma is the default",
        "cores": options.cores,
        "all_reduce": held,
    }


# ---- the picture

LABELS = {"before": "an earlier version", "now": "measured", "simulated": "simulated"}


def draw(body: dict[str, Any], path: Path) -> None:
    """Draw each figure against ranks, both logarithmic; `simulated` rows go on where others end."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator
    from plot import STYLE, save  # which chooses how matplotlib draws

    from ringcomm.tools.page import COLORS

    keys = [key for key in LABELS if key in body]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 3, figsize=(10, 6), layout="constrained")
        for panel, (name, (title, unit, scale)) in zip(axes.flat, PANELS.items(), strict=True):
            for key, color in zip(keys, COLORS, strict=False):
                for plans, look in (("sparse", "o-"), ("dense", "s--")):
                    points = [
                        (row["ranks"], figure_of(row[plans], name) / scale)
                        for row in body[key]["rows"]
                        if plans in row and not row[plans]["failed"]
                    ]
                    if points and not (name == "meeting_s" and plans == "dense"):
                        panel.plot(*zip(*points, strict=True), look, color=color, ms=3.5,
                                   label=f"{LABELS[key]}, {plans} plans")  # fmt: skip
            panel.set(title=f"{title}{', ' if unit else ''}{unit}", yscale="symlog", xlabel="ranks")
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.flat[0].legend(frameon=False)
        machine = body[keys[-1]].get("machine") or body[keys[0]]["machine"]
        save(
            figure,
            path,
            f"the most of all ranks; {LOCAL} ranks a host from {2 * LOCAL} on; hosts are network "
            f"namespaces on {machine['cores']} cores of {machine['cpu']}, {machine['date'][:10]}\n"
            f"sparse: {SPARSE}; dense: {DENSE}",
        )


def figure_of(row: Row, name: str) -> float:
    return float(row[name] if name == "meeting_s" else row["stages"][-1][name])


def run(options: argparse.Namespace) -> None:
    body: dict[str, Any] = {}
    if options.json:
        with contextlib.suppress(FileNotFoundError):
            body = json.loads(options.json.read_text(encoding="utf-8"))
    if options.ranks:
        machine = report.machine()
        rows = measure_all(options)
        earlier = body.get(options.key, {}).get("rows", [])
        rows += [row for row in earlier if row["ranks"] not in options.ranks]
        rows.sort(key=lambda row: row["ranks"])
        model = hold_model(rows, options)
        body[options.key] = {"machine": machine, "rows": rows, "model": model}
        body |= {"machine": machine}
        body.pop("benchmark", None)
        report.write_json(options.json, "wide", body)
    if options.plot:
        draw(body, options.plot)


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    add = parser.add_argument
    numbers = report.list_of(report.positive)
    add("--ranks", type=numbers, default="2,4,8,16,32,64,128,256", help="'': only draw the file")
    add("--calls", type=report.positive, default=3, help="in each of three batches")
    add("--patience", type=float, default=120, help="seconds after which a run is ended")
    add("--key", default="now", help="under which the file has these figures")
    add("--program", type=Path, default=ROOT / "build" / "tests" / "wide")
    add("--plot", type=Path, metavar="FILE", help="draw it; needs matplotlib")
    options = parser.parse_args()
    options.cores = report.machine()["cores"]
    return options


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    run(parse())
