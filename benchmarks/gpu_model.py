"""The model of GPUs beside NCCL's published figures: nothing is measured.

    python benchmarks/gpu_model.py

The kernel is that of `kernel_for` in csrc/device/kernels_for.cc. Its time is what `seconds_of` says
there, and LAUNCH. NCCL's time is a line through two published figures: that of small messages, and
bytes over the bus bandwidth of long ones. Where more is published NCCL took longer than this line,
so the ratio is not in our favour. A second table has what others measured of such kernels, beside
the model.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

import torch  # noqa: F401  the library needs it to be loaded

from lab import benchmark, report
from ringcomm import _C
from ringcomm.tools.bench import traits

SIZES = "1K,4K,16K,64K,256K,1M,4M,16M,64M,256M,1G"
# The model leaves it out. One-shot of 512 float32 took 5.9 us on eight H100 (sglang pull request
# 2904), two flags 3.6: so it has all that is missing there.
LAUNCH = 2.3e-6
# NCCL's all_reduce on one host of eight: (capability, ranks).
PUBLISHED = {(90, 8): (9.5e-6, 475e9)}  # small ones on H100; nccl-tests issue 272, H200
SHORT, SHORT_TARGET, LONG_TARGET = 1 << 20, 1.0, 0.9


class Anchor(NamedTuple):
    """An all_reduce that others measured on H100, by a kernel such as one of these."""

    kernel: str
    ranks: int
    bytes: int
    seconds: float
    nccl: float | None  # in the same table
    source: str


ANCHORS = [
    Anchor("one_shot", 2, 2 << 10, 3.7e-6, None, "sglang 2904"),
    Anchor("one_shot", 4, 2 << 10, 4.8e-6, None, "sglang 2904"),
    Anchor("one_shot", 8, 2 << 10, 5.9e-6, None, "sglang 2904"),
    Anchor("two_shot", 8, 1 << 20, 16.7e-6, None, "sglang 2904"),
    Anchor("two_shot", 8, 2 << 20, 22.1e-6, None, "sglang 2904"),
    Anchor("two_shot", 8, 4 << 20, 33.8e-6, None, "sglang 2904"),
    Anchor("two_shot", 8, 512 << 10, 15e-6, 24e-6, "vLLM 42324"),
    Anchor("two_shot", 8, 1 << 20, 17e-6, 25e-6, "vLLM 42324"),
    Anchor("two_shot", 8, 4 << 20, 37e-6, 50e-6, "vLLM 42324"),
    Anchor("two_shot", 8, 64 << 20, 468e-6, 316e-6, "vLLM 42324"),
    Anchor("two_shot", 8, 128 << 20, 923e-6, 561e-6, "vLLM 42324"),
    Anchor("two_shot", 4, 512 << 10, 17e-6, 17e-6, "vLLM 24111"),
    Anchor("two_shot", 4, 1 << 20, 18e-6, 19e-6, "vLLM 24111"),
    Anchor("two_shot", 4, 4 << 20, 43e-6, 37e-6, "vLLM 24111"),
    Anchor("two_shot", 6, 512 << 10, 15e-6, 23e-6, "vLLM 24111"),
    Anchor("two_shot", 6, 1 << 20, 17e-6, 25e-6, "vLLM 24111"),
    Anchor("two_shot", 6, 4 << 20, 37e-6, 53e-6, "vLLM 24111"),
]


def by_model(collective: str, ranks: int, size: int, nvlink: bool, capability: int) -> Any:
    """Return the kernel that is chosen, and the seconds of all, for bytes of the larger buffer."""
    shard = size // ranks if collective in traits.IN_PARTS else size
    kernel, seconds = _C.kernel_seconds(collective, ranks, shard, nvlink, capability)
    return kernel, {name: LAUNCH + kernel_seconds for name, kernel_seconds in seconds.items()}


def row_of(options: argparse.Namespace, size: int) -> dict[str, Any]:
    """Return a line of the table, in seconds and bytes."""
    setting = (options.collective, options.ranks)
    kernel, seconds = by_model(*setting, size, options.nvlink, options.capability)
    ours = seconds[kernel]
    _, busbw = traits.bandwidths(options.collective, size, ours, options.ranks)
    row = {"bytes": size, "kernel": kernel, "seconds": ours, "busbw_gb_per_s": busbw}
    published = PUBLISHED.get((options.capability, options.ranks))
    if published and options.nvlink and options.collective == "all_reduce":
        alpha, rate = published
        moved = size * traits.FACTORS[options.collective](options.ranks)
        theirs = alpha + moved / rate
        target = SHORT_TARGET if size <= SHORT else LONG_TARGET
        row |= {"nccl_seconds": theirs, "ratio": theirs / ours, "target": target}
        if theirs / ours < target:
            row["needs_gb_per_s"] = needed(options, kernel, size, theirs / target)
    return row


def needed(options: argparse.Namespace, kernel: str, size: int, allowed: float) -> float | None:
    """Return the bus bandwidth in GB/s with which the kernel would take `allowed` seconds.

    None: no such rate would do, because flags and the launch take longer.
    """
    _, seconds = by_model("all_reduce", options.ranks, 0, options.nvlink, options.capability)
    moved = size * traits.FACTORS["all_reduce"](options.ranks)
    left = allowed - seconds[kernel]
    return moved / left / 1e9 if left > 0 else None


def anchors(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what others measured, beside the model."""
    rows = []
    for anchor in ANCHORS:
        _, seconds = by_model("all_reduce", anchor.ranks, anchor.bytes, True, 90)
        told = seconds[anchor.kernel]
        rows.append({**anchor._asdict(), "model_seconds": told, "ratio": anchor.seconds / told})
    return rows if options.nvlink and options.capability == 90 else []


def told(row: dict[str, Any]) -> list[str]:
    """Return the cells of a line."""
    cells = [report.show_size(row["bytes"]), row["kernel"], report.show_time(row["seconds"])]
    cells.append(f"{row['busbw_gb_per_s']:.1f}")
    if "ratio" not in row:
        return [*cells, "-", "-", "-"]
    verdict = "met" if row["ratio"] >= row["target"] else "missed"
    if rate := row.get("needs_gb_per_s"):
        verdict = f"missed: needs {rate:.0f} GB/s"
    return [*cells, report.show_time(row["nccl_seconds"]), f"{row['ratio']:.2f}", verdict]


def run(options: argparse.Namespace) -> None:
    rows = [row_of(options, size) for size in options.sizes]
    link = "NVLink" if options.nvlink else "PCIe"
    print(f"{options.collective}, {options.ranks} ranks, {link}, compute capability "
          f"{options.capability}: by the model, not measured\n")  # fmt: skip
    head = [
        "bytes",
        "kernel",
        "µs",
        "busbw GB/s",
        "NCCL µs",
        "NCCL / ours",
        "target",
    ]
    report.print_table(head, [told(row) for row in rows], options.markdown)
    others = anchors(options)
    if others:
        print("What others measured on H100, and the model of such a kernel\n")
        head = [
            "kernel",
            "ranks",
            "bytes",
            "theirs µs",
            "model µs",
            "theirs / model",
            "NCCL µs",
            "by",
        ]
        cells = [
            [
                *(row["kernel"], str(row["ranks"]), report.show_size(row["bytes"])),
                *(report.show_time(row["seconds"]), report.show_time(row["model_seconds"])),
                f"{row['ratio']:.2f}",
                report.show_time(row["nccl"]) if row["nccl"] else "-",
                row["source"],
            ]
            for row in others
        ]
        report.print_table(head, cells, options.markdown)
    chosen = {name: getattr(options, name) for name in ("collective", "ranks", "capability")}
    body = {"measured": False, **chosen, "nvlink": options.nvlink, "launch_s": LAUNCH,
            "rows": rows, "anchors": others}  # fmt: skip
    report.write_json(options.json, "gpu_model", body)


def main() -> int:
    parser = report.parser(__doc__)
    add = parser.add_argument
    add("--collective", choices=["all_reduce", "reduce_scatter", "all_gather", "broadcast"],
        default="all_reduce")  # fmt: skip
    add("--ranks", type=int, choices=range(2, 33), metavar="N", default=8)
    add("--capability", type=int, choices=range(70, 200), metavar="N", default=90,
        help="90 is sm_90")  # fmt: skip
    add("--nvlink", action=argparse.BooleanOptionalAction, default=True, help="or PCIe")
    add("--sizes", type=report.list_of(report.size), default=SIZES, help="of the larger buffer")
    return benchmark.main(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
