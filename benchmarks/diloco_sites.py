"""Outer steps of DiLoCo between two sites: int8 and fp32 by ringcomm, and fp32 by Gloo.

    python benchmarks/diloco_sites.py
    python benchmarks/diloco_sites.py --wan 300,50 --rounds 5 --json d.json --layers 4
    python benchmarks/diloco_sites.py --what computing --wan 100,100 --torchft
    python benchmarks/diloco_sites.py --what losses --seeds 3

Runs examples/diloco.py, and hands it the options that are not its own. Sites are network
namespaces on long links: root, iproute2 and nftables are needed, and nothing outside them is
touched. A round runs each way once. Seconds are medians of rounds, of what averaging takes in the
middle outer step.

With `--what computing` it runs examples/sites.py, and tells the share of its time in which inner
steps did not wait for rounds: that of the site that waited longest. `--what losses` compares the
loss of the outer copy over seeds and ways to send less; these sites are processes of this host.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import statistics
import sys
from functools import partial
from typing import Any

from lab import ROOT, report
from lab.course import starters
from lab.hosts import Hosts
from lab.namespaces import missing
from lab.site import NO_NAMES
from lab.trainee import Log
from lab.wan import Wan
from ringcomm.elastic import World

WAYS = {
    "ringcomm, int8": ["--outer", "int8"],
    "ringcomm, fp32": ["--outer", "fp32"],
    "Gloo, fp32": ["--outer", "fp32", "--backend", "gloo"],
}
SETTINGS = ["--width", "256", "--layers", "3", "--batch", "8"]  # 2.4 million parameters
SETTINGS += ["--inner", "10", "--steps", "5", "--enough", "9"]
OVERLAPPING = {
    "32 bits, awaited": ["--bits", "32"],
    "8 bits, awaited": [],
    "8 bits, up to 20 steps later": ["--delay", "20"],
    "4 bits, 2 fragments, up to 15 steps later": [
        *["--bits", "4", "--fragments", "2", "--delay", "15"]
    ],
    "8 bits, every 6 s": ["--seconds", "6"],
}
TORCHFT = {  # by lab/torchft_sites.py; its codes of 8 bits need a GPU
    "torchft on Gloo, 32 bits, awaited": [],
    "torchft on Gloo, 32 bits, 20 steps later": ["--delay", "20"],
}
CLIENTS = ROOT / "build" / "clients" / "bin" / "python"
LARGE = ["--width", "256", "--layers", "3", "--batch", "4"]  # 2.4 million parameters
LARGE += ["--every", "50", "--rounds", "6", "--enough", "9"]
# With few numbers, error feedback takes the place of the outer momentum (arXiv 2508.15706).
PLAIN = ["--outer-rate", "1", "--momentum", "0"]
FEWER = {
    "fp32": ["--bits", "32"],
    "8 bits": ["--bits", "8"],
    "4 bits": ["--bits", "4"],
    "2 bits": ["--bits", "2"],
    "fp32, no momentum": ["--bits", "32", *PLAIN],
    "64 of each 4,096, 4 bits, no momentum": ["--bits", "4", "--topk", "64", *PLAIN],
    "64 of each 4,096, 2 bits, no momentum": ["--bits", "2", "--topk", "64", *PLAIN],
}
SMALL = ["--batch", "8", "--every", "15", "--rounds", "32", "--enough", "9"]
LINE = re.compile(
    r"loss=(?P<loss>\S+) rounds=\d+ steps=(?P<steps>\d+) seconds=(?P<seconds>\S+) "
    r"waited=(?P<waited>\S+) sum=(?P<sum>\S+) losses=(?P<losses>\S+)"
)
END = re.compile(r"loss=[\d.]+->([\d.]+) outer=\w+ seconds=([\d.]+) alike=True")


def run(hosts: Hosts, way: str, options: argparse.Namespace, rest: list[str]) -> tuple[float, ...]:
    """Return the final loss, and the seconds of an outer step."""
    command = [sys.executable, str(ROOT / "examples" / "diloco.py"), *WAYS[way], *rest]
    ranks = hosts.run_ranks([*command, *SETTINGS, *rest], 1, timeout=options.deadline)
    match = END.search(ranks[0].output)
    if match is None or any(rank.returncode for rank in ranks):
        sys.exit("\n".join(rank.output for rank in ranks))
    return float(match[1]), float(match[2])


def outer_steps(options: argparse.Namespace, rest: list[str]) -> list[dict[str, Any]]:
    """Measure the seconds of outer steps; print and return them."""
    figures: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    with Hosts(2, far=options.wan) as hosts:
        for _ in range(options.rounds):
            for way in WAYS:
                report.progress(f"{way} ")
                figures[way].append(run(hosts, way, options, rest))
    report.progress("")
    rows, results = [], list[dict[str, Any]]()
    for way, some in figures.items():
        losses, seconds = zip(*some, strict=True)
        spread = f"[{min(seconds):.3f}-{max(seconds):.3f}]"
        rows.append([way, f"{statistics.median(seconds):.3f}", spread, f"{losses[0]:.4f}"])
        results.append({"way": way, "seconds": seconds, "losses": losses})
    report.print_table(["outer steps by", "s", "[rounds]", "final loss"], rows, options.markdown)
    return results


def computing(options: argparse.Namespace, rest: list[str]) -> list[dict[str, Any]]:
    """Measure how much of their time sites compute; print and return it."""
    rows, results = [], list[dict[str, Any]]()
    ours = [sys.executable, str(ROOT / "examples" / "sites.py")]
    ways = {way: [*ours, *LARGE, *words] for way, words in OVERLAPPING.items()}
    if options.torchft:
        theirs = [str(CLIENTS), "-m", "lab.torchft_sites"]
        ways |= {way: [*theirs, *LARGE, *words] for way, words in TORCHFT.items()}
    with Hosts(2, far=options.wan) as hosts:
        for way, words in ways.items():
            if options.only not in way:
                continue
            report.progress(f"{way} ")
            command = [*words, *rest]
            env = {**NO_NAMES, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
            ranks = hosts.run_ranks(command, 1, env=env, timeout=options.deadline)
            lines = [LINE.search(rank.output) for rank in ranks]
            if not all(lines) or any(rank.returncode for rank in ranks):
                sys.exit("\n".join(rank.output for rank in ranks))
            told = [line.groupdict() for line in lines if line is not None]
            if len({line["sum"] for line in told}) > 1:
                sys.exit(f"sites differ: {told}")
            shares = [1 - float(line["waited"]) / float(line["seconds"]) for line in told]
            pace = min(float(line["seconds"]) / int(line["steps"]) for line in told)
            rows.append([way, f"{min(shares):.1%}", f"{pace * 1e3:.0f}", told[0]["loss"]])
            results.append({"way": way, "shares": shares, "sites": told})
    report.progress("")
    heads = ["rounds", "computing", "ms an inner step", "loss"]
    report.print_table(heads, rows, options.markdown)
    return results


def learn(world: World, log: Log, words: list[str]) -> None:
    """Be one site of a comparison of losses."""
    spec = importlib.util.spec_from_file_location("diloco", ROOT / "examples" / "diloco.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["diloco"] = importlib.util.module_from_spec(spec)  # which sites.py imports
    spec.loader.exec_module(sys.modules["diloco"])
    sites = runpy.run_path(str(ROOT / "examples" / "sites.py"))
    log("end", line=sites["train"](world, sites["parse"](words))[1])


def losses(options: argparse.Namespace, rest: list[str]) -> list[dict[str, Any]]:
    """Compare the losses that are reached; print and return them with their curves."""
    results: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for way, words in FEWER.items():
            report.progress(f"seed {seed}, {way} ")
            program = partial(learn, words=["--seed", str(seed), *SMALL, *words, *rest])
            with starters(2, program) as some:
                lines = [LINE.search(end["line"]) for end in some.await_ends([0, 1], 600)]
            told = [line.groupdict() for line in lines if line is not None]
            curves = [[float(loss) for loss in line["losses"].split(",")] for line in told]
            reached = float(told[0]["loss"])
            results.append({"way": way, "seed": seed, "loss": reached, "curves": curves})
    report.progress("")
    rows = []
    exact = {(row["way"], row["seed"]): row["loss"] for row in results}
    for way, words in FEWER.items():
        fp32 = "fp32, no momentum" if PLAIN[0] in words else "fp32"
        some_rows = [row for row in results if row["way"] == way]
        reached_by_seed = [row["loss"] for row in some_rows]
        beside = [row["loss"] - exact[fp32, row["seed"]] for row in some_rows]
        mean = f"{statistics.mean(reached_by_seed):.4f}"
        spread = f"({min(reached_by_seed):.4f} to {max(reached_by_seed):.4f})"
        rows.append([way, f"{mean} {spread}", f"{min(beside):+.4f} to {max(beside):+.4f}"])
    report.print_table(["sent", "loss", "beside fp32"], rows, options.markdown)
    return results


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--what", choices=["outer", "computing", "losses"], default="outer")
    parser.add_argument("--wan", type=Wan.of, default="100,25", metavar="MBIT,MS[,PERCENT]")
    parser.add_argument("--rounds", type=report.positive, default=3)
    parser.add_argument("--seeds", type=report.positive, default=3)
    parser.add_argument("--torchft", action="store_true", help="its DiLoCo, too")
    parser.add_argument("--only", default="", metavar="TEXT", help="ways whose names have it")
    options, rest = parser.parse_known_args()
    if (reason := missing()) and options.what != "losses":
        sys.exit(reason)
    machine = report.machine()
    if options.what != "losses":
        print(f"2 sites, {options.wan.rate:g} Mbit/s, {options.wan.delay:g} ms one way\n")
    measure = {"outer": outer_steps, "computing": computing, "losses": losses}[options.what]
    results = measure(options, rest)
    body = {"machine": machine, "wan": list(options.wan), "options": rest}
    name = "diloco_sites" if options.what == "outer" else f"diloco_{options.what}"
    report.write_json(options.json, name, body | {"results": results})


if __name__ == "__main__":
    main()
