"""An all_reduce of fp32 beside those of fewer bytes, hosts linked at 1 Gbit/s.

Hosts are network namespaces with links as slow as `--rate` or `--wan` says: root, iproute2 and
nftables are needed, and nothing outside them is touched.

    python benchmarks/compressed.py --sizes 1M,8M,32M
    python benchmarks/compressed.py --hosts 2 --local 2 --sizes 32M --json c.json
    python benchmarks/compressed.py --wan 100,25 --sizes 8M
    python benchmarks/compressed.py --kernels

All of them are in the same processes and take turns. A ratio is that of the medians. `--kernels`
measures the kernels alone, on one core, in bytes of fp32.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from lab import benchmark, report
from lab.hosts import Hosts
from lab.namespaces import missing
from lab.wan import Wan

WAYS = ["gloo", "fp32", "bf16", "fp16", "fp8", "int8"]  # Gloo's is of fp32, too


# ---- between hosts


def be_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from ringcomm.compression.quantized import WIDTHS, quantized_all_reduce

    dist.init_process_group("gloo")
    ours = dist.new_group(backend="ringcomm")
    results = []
    for size in options.sizes:
        # Each begins with zeros: sums of random numbers would grow from turn to turn.
        tensors = {way: torch.zeros(size // 4) for way in options.ways}

        def call_of(way: str, tensor: torch.Tensor) -> Callable[[], object]:
            if way in WIDTHS:
                bits = WIDTHS[way]
                return lambda: quantized_all_reduce(tensor, bits, ours, format=way)
            group = dist.group.WORLD if way == "gloo" else ours
            return lambda: dist.all_reduce(tensor, group=group)

        calls = {way: call_of(way, tensor) for way, tensor in tensors.items()}
        times: dict[str, list[float]] = {way: [] for way in calls}
        for turn in range(options.turns + 2):  # the first two make groups, and warm TCP up
            for way, call in calls.items():
                dist.barrier(ours)
                began = time.perf_counter()
                call()
                dist.barrier(ours)
                if turn > 1:
                    times[way].append(time.perf_counter() - began)
        results.append({"bytes": size, "seconds": times})
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(results), flush=True)
    dist.destroy_process_group()


def show(results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    rows = []
    for result in results:
        medians = {way: statistics.median(some) for way, some in result["seconds"].items()}
        for way, some in result["seconds"].items():
            spread = f"[{min(some) * 1e3:.4g}-{max(some) * 1e3:.4g}]"
            ratio = f"{medians['fp32'] / medians[way]:.2f}"
            row = [f"{result['bytes'] / 2**20:g} MiB", way, f"{medians[way] * 1e3:.4g}", spread]
            rows.append([*row, ratio])
    head = ["bytes of fp32", "sent as", "ms", "[turns]", "times as fast as fp32"]
    report.print_table(head, rows, options.markdown)


def between_hosts(options: argparse.Namespace) -> None:
    machine = report.machine()
    rate = None if options.wan else options.rate or None
    with Hosts(options.hosts, rate=rate, far=options.wan) as hosts:
        results = benchmark.ask_ranks(hosts, __file__, options.local)
    links = f"{options.wan.rate:g} Mbit/s, {options.wan.delay:g} ms" if options.wan else rate
    print(f"{options.hosts} hosts of {options.local}, links of {links}, {options.turns} turns\n")
    show(results, options)
    facts = {"machine": machine, "hosts": options.hosts, "local": options.local, "links": links}
    report.write_json(options.json, "compressed", facts | {"results": results})


# ---- kernels


def kernels(options: argparse.Namespace) -> None:
    """Print GB/s of fp32 that one core quantises, and that it takes apart and adds up."""
    import torch

    from ringcomm import _C

    torch.set_num_threads(1)
    source, total = torch.randn(1 << 20), torch.empty(1 << 20)
    left = torch.zeros_like(source)
    blocks = torch.empty(4096 * 260, dtype=torch.uint8)
    rows = []
    for coding, name in enumerate(["int8", "fp8"]):
        halves, encode = total[: 1 << 19], functools.partial(_C.quantize, source, blocks, coding)
        calls: dict[str, Callable[[], None]] = {
            "quantise": encode,
            "by chance": functools.partial(encode, None, 1),
            "with feedback": functools.partial(encode, left),
            "add up 2": functools.partial(_C.dequantize, blocks, halves, coding, 2, 2.0),
            "take apart": functools.partial(_C.dequantize, blocks, total, coding),
        }
        for what, call in calls.items():
            call()
            rates = []
            for _ in range(max(options.turns, 3) * 10):
                began = time.perf_counter()
                call()
                rates.append(4 * source.numel() / (time.perf_counter() - began) / 1e9)
            rows.append([name, what, f"{statistics.median(rates):.1f}", f"{max(rates):.1f}"])
    report.print_table(["format", "kernel", "GB/s", "best"], rows, options.markdown)


def main() -> None:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--hosts", type=report.positive, default=2)
    add("--local", type=report.positive, default=1, help="ranks on each host")
    add("--rate", default="1gbit", help="of each link; empty: as fast as it goes")
    add("--wan", type=Wan.of, metavar="MBIT,MS[,PERCENT]", help="long links")
    add("--sizes", type=report.list_of(report.size), default="1M,8M,32M", help="bytes of fp32")
    add("--ways", type=report.list_of(str), default=",".join(WAYS), help=f"of {WAYS}")
    add("--turns", type=report.positive, default=9)
    add("--kernels", action="store_true", help="the kernels alone, on one core")
    add("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        be_rank(options)
    elif options.kernels:
        kernels(options)
    elif reason := missing():
        sys.exit(reason)
    else:
        between_hosts(options)


if __name__ == "__main__":
    main()
