"""The algorithms of `examples/algorithms` beside those that the library chooses, between hosts.

Hosts are network namespaces on this machine: root and iproute2 are needed, and nothing outside them
is touched. Their links are as fast as the machine, or long ones, by `--wan MBIT,MS`.

    python benchmarks/by_hand.py --hosts 4,8 --wan 300,5 --json by_hand.json

All ranks begin an operation at the same moment, by the clock that the namespaces have in common. It
ends when the last rank is there. The table's choice, the library's other algorithms and the
examples take turns. So what disturbs the machine disturbs them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from between_hosts import call_of, parse_size, tuned
from simulated import ALGORITHMS, measure, time_all

from lab.by_hand import example
from lab.hosts import Hosts
from lab.namespaces import missing
from lab.wan import Wan

EXAMPLES = {
    "all_reduce": ("halving_doubling", "swing", "double_binary_trees"),
    "reduce_scatter": ("halving_doubling", "pat"),
    "all_gather": ("halving_doubling", "pat"),
    "broadcast": ("bine", "double_binary_trees"),
}
TABLE = "table"
ENV = {"RINGCOMM_SPIN_US": "0"}


class Case(NamedTuple):
    collective: str
    bytes: int
    algorithm: str


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for collective in options.collectives.split(","):
        for size in map(parse_size, options.sizes.split(",")):
            for name in (TABLE, *ALGORITHMS[collective], *EXAMPLES[collective]):
                yield Case(collective, size, name)


# ---- a rank


def be_rank(options: argparse.Namespace) -> None:
    import torch.distributed as dist

    dist.init_process_group("ringcomm")
    size = dist.get_world_size()
    groups = {name: group_of(name) for name in dict.fromkeys(c.algorithm for c in cases(options))}
    calls = {
        case: call_of(case.collective, case.bytes, size, groups[case.algorithm])
        for case in cases(options)
    }
    time_all(list(calls.values()), options.turns)
    dist.destroy_process_group()


def group_of(name: str) -> Any:
    import torch.distributed as dist

    import ringcomm

    collectives = [collective for collective, names in EXAMPLES.items() if name in names]
    if collectives:
        ringcomm.algorithms.register_algorithm(name, example(name), collectives)
    asked = None if name == TABLE else name
    return dist.new_group(backend="ringcomm", pg_options=ringcomm.Options(algorithm=asked))


# ---- all of them


def tell(hosts: int, some: list[Case], times: list[list[float]]) -> list[dict[str, Any]]:
    """Print each algorithm's time over that of the table's choice, turn by turn: the median."""
    rows = []
    by_table = {case[:2]: took for case, took in zip(some, times, strict=True)
                if case.algorithm == TABLE}  # fmt: skip
    for case, took in zip(some, times, strict=True):
        usual = by_table[case[:2]]
        ratios = sorted(seconds / other for seconds, other in zip(took, usual, strict=True))
        rows.append({"hosts": hosts, **case._asdict(), "measured": took})
        print(
            f"{hosts} hosts  {case.collective:14} {case.bytes:>8} B  {case.algorithm:19} "
            f"{statistics.median(took) * 1e3:8.2f} ms  {statistics.median(ratios):5.2f} of the "
            f"table's ({ratios[0]:.2f}..{ratios[-1]:.2f})",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hosts", default="4,8", help="how many, in turn: powers of two")
    parser.add_argument("--wan", type=Wan.of, metavar="MBIT,MS", help="long links")
    parser.add_argument("--collectives", default=",".join(EXAMPLES))
    parser.add_argument("--sizes", default="4K,64K,1M")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        be_rank(options)
        return
    if reason := missing():
        sys.exit(reason)
    rows: list[dict[str, Any]] = []
    for count in map(int, options.hosts.split(",")):
        with Hosts(count, far=options.wan) as hosts, tempfile.TemporaryDirectory() as folder:
            os.environ.update(ENV, RINGCOMM_CONGESTION=options.congestion)
            os.environ.update(RINGCOMM_COSTS=str(tuned(hosts, Path(folder), 1)))
            rows += tell(count, list(cases(options)), measure(hosts, __file__))
            del os.environ["RINGCOMM_COSTS"]
    if options.json:
        body = {
            "benchmark": "by_hand",
            "wan": options.wan,
            "congestion": options.congestion,
            "load": os.getloadavg(),
            "rows": rows,
        }
        options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
