"""Outer steps of DiLoCo between two sites: int8 and fp32 by ringcomm, and fp32 by Gloo.

    python benchmarks/diloco_sites.py
    python benchmarks/diloco_sites.py --wan 300,50 --rounds 5 --json d.json --layers 4

Runs examples/diloco.py, and hands it the options that are not its own. Sites are network
namespaces on long links: root, iproute2 and nftables are needed, and nothing outside them is
touched. A round runs each way once. Seconds are medians of rounds, of what averaging takes in the
middle outer step.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from typing import Any

from lab import ROOT, report
from lab.hosts import Hosts
from lab.namespaces import missing
from lab.wan import Wan

WAYS = {
    "ringcomm, int8": ["--outer", "int8"],
    "ringcomm, fp32": ["--outer", "fp32"],
    "Gloo, fp32": ["--outer", "fp32", "--backend", "gloo"],
}
SETTINGS = ["--width", "256", "--layers", "3", "--batch", "8"]  # 2.4 million parameters
SETTINGS += ["--inner", "10", "--steps", "5", "--enough", "9"]
END = re.compile(r"loss=[\d.]+->([\d.]+) outer=\w+ seconds=([\d.]+) alike=True")


def run(hosts: Hosts, way: str, options: argparse.Namespace, rest: list[str]) -> tuple[float, ...]:
    """Return the final loss, and the seconds of an outer step."""
    command = [sys.executable, str(ROOT / "examples" / "diloco.py"), *WAYS[way], *rest]
    ranks = hosts.run_ranks([*command, *SETTINGS, *rest], 1, timeout=options.deadline)
    match = END.search(ranks[0].output)
    if match is None or any(rank.returncode for rank in ranks):
        sys.exit("\n".join(rank.output for rank in ranks))
    return float(match[1]), float(match[2])


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--wan", type=Wan.of, default="100,25", metavar="MBIT,MS[,PERCENT]")
    parser.add_argument("--rounds", type=report.positive, default=3)
    options, rest = parser.parse_known_args()
    if reason := missing():
        sys.exit(reason)
    machine = report.machine()
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
    print(f"2 sites, {options.wan.rate:g} Mbit/s, {options.wan.delay:g} ms one way\n")
    report.print_table(["outer steps by", "s", "[rounds]", "final loss"], rows, options.markdown)
    body = {"machine": machine, "wan": list(options.wan), "options": rest}
    report.write_json(options.json, "diloco_sites", body | {"results": results})


if __name__ == "__main__":
    main()
