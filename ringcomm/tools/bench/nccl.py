"""NCCL's settings where ranks share a GPU, and the columns that nccl-tests print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringcomm.tools.bench import cases
from ringcomm.tools.bench.report import show_bandwidth, show_time
from ringcomm.tools.bench.sample import UNMEASURED, Facts

# Each rank a host: NCCL then finds no second rank on its GPU, and no memory in common. How fast it
# is over sockets is no question of NCCL's making.
APART = {
    "NCCL_HOSTID": "host-{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0",
}  # fmt: skip
TYPES = {"float32": "float", "float64": "double", "float16": "half"}
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
HEAD = ("size", "count", "type", "redop", "root", *("time", "algbw", "busbw", "#wrong") * 2)
UNITS = ("(B)", "(elements)", "", "", "", *("(us)", "(GB/s)", "(GB/s)", "") * 2)
WIDTHS = (12, 13, 9, 7, 7, *(9, 8, 8, 7) * 2)


def apart(rank: int, ranks: int, gpus: int) -> dict[str, str]:
    """Return what lets so many ranks of NCCL run on so few GPUs; nothing if there are enough."""
    if ranks <= gpus:
        return {}
    return {name: value.replace("{rank}", str(rank)) for name, value in APART.items()}


def lines_of(samples: Sequence[Facts]) -> Iterator[str]:
    """Write the samples of a collective as nccl-tests do, a table for each backend and load."""
    for key in dict.fromkeys((sample["backend"], sample["loaded"]) for sample in samples):
        some = [sample for sample in samples if (sample["backend"], sample["loaded"]) == key]
        first = some[0]
        busy = ", with busy cores" if first["loaded"] else ""
        yield f"# {first['collective']}, {key[0]}, {first['ranks']} ranks{busy}"
        width = sum(WIDTHS[:5])
        yield "#".ljust(width) + "out-of-place".center(32) + "in-place".center(31).rstrip()
        yield _line("#", HEAD)
        yield _line("#", UNITS)
        for count in dict.fromkeys(sample["count"] for sample in some):
            yield _line(" ", _cells([sample for sample in some if sample["count"] == count]))
        wrong = sum(sample["wrong"] or 0 for sample in some)
        means = [sample["busbw_gb_per_s"] for sample in some if not sample["refused"]]
        yield f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"
        yield f"# Avg bus bandwidth    : {sum(means) / max(1, len(means)):g}"
        yield ""


def _cells(places: Sequence[Facts]) -> list[str]:
    sample = places[0]
    root = cases.ROOT if sample["collective"] in ROOTED else -1
    type_ = TYPES.get(sample["type"], sample["type"])
    cells = [str(sample["bytes"]), str(sample["count"]), type_, sample["redop"], str(root)]
    by_place = {place["in_place"]: place for place in places}
    for in_place in (False, True):
        place = by_place.get(in_place)
        if place is None or place["refused"]:
            cells += [UNMEASURED] * 4
            continue
        wrong = UNMEASURED if place["wrong"] is None else str(place["wrong"])
        bandwidths = [show_bandwidth(place[f"{name}_gb_per_s"]) for name in ("algbw", "busbw")]
        cells += [show_time(place["median_s"]), *bandwidths, wrong]
    return cells


def _line(mark: str, cells: Sequence[str]) -> str:
    """Align the cells to the right; the mark takes the place of one space."""
    text = "".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return (mark + text[1:]).rstrip()
