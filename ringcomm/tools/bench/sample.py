"""A measured size of a collective: its figures, as JSON, as CSV and as lines of a table."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm.tools.bench import traits, trust
from ringcomm.tools.bench.cases import Form
from ringcomm.tools.bench.report import Spread, show_bandwidth, show_time

# A column of CSV: what it has, from what JSON has.
SAME = ("collective", "backend", "ranks", "device", "loaded", "in_place", "count", "type", "redop")
CSV = dict(zip(SAME, SAME, strict=True)) | {
    "size": "bytes",
    "time": "median_s",
    "lowest": "low_s",
    "highest": "high_s",
    "algbw": "algbw_gb_per_s",
    "busbw": "busbw_gb_per_s",
    "#wrong": "wrong",
    "of_its_copies": "of_its_copies",
    "algorithm": "algorithm",
    "refused": "refused",
    "others_share": "others_share",
}
UNITS = {
    "size": "B",
    "time": "us",
    "lowest": "us",
    "highest": "us",
    "algbw": "GB/s",
    "busbw": "GB/s",
}
UNMEASURED = "N/A"  # as nccl-tests have it
# Columns of the table: name, unit and width. Those of PLACE stand there for in place and out of it.
COLUMNS = [("size", "B", 8), ("count", "elements", 9), ("type", "", 8), ("redop", "", 5)]
PLACE = [
    ("time", "µs", 9),
    ("lowest..highest", "µs", 17),
    ("algbw", "GB/s", 7),
    ("busbw", "GB/s", 7),
    ("#wrong", "elements", 8),
]


@dataclass(frozen=True)
class Workload:
    """A collective of so many elements, between so many ranks, in a form."""

    collective: str
    count: int
    ranks: int
    form: Form

    @property
    def size(self) -> int:
        """Bytes of the larger buffer."""
        return self.count * self.form.dtype.itemsize

    @property
    def redop(self) -> str:
        return self.form.op if self.collective in traits.REDUCING else "none"


@dataclass
class Sample:
    """A workload on one backend, idle or loaded. Times are in seconds."""

    workload: Workload
    backend: str
    loaded: bool = False
    algorithm: str = ""  # ringcomm's, where it is known
    calls: int = 0  # a round
    rounds: list[float] = field(default_factory=list)  # the median of each round's calls
    times: list[float] = field(default_factory=list)  # every call of every round
    copies: list[float] = field(default_factory=list)  # each round's: what its copies alone take
    wrong: int | None = None  # elements on all ranks; None: not counted
    refused: str = ""  # why the backend does not do that
    others: float | None = None  # what other processes used of the cores that the ranks need

    def add(self, times: list[float]) -> None:
        self.rounds.append(statistics.median(times))
        self.times += times

    def facts(self) -> dict[str, Any]:
        """Return what JSON gets."""
        workload = self.workload
        named = {
            "collective": workload.collective,
            "backend": self.backend,
            "ranks": workload.ranks,
            "device": workload.form.device,
            "type": workload.form.type,
            "redop": workload.redop,
            "in_place": workload.form.in_place,
            "bytes": workload.size,
            "count": workload.count,
            "loaded": self.loaded,
            "algorithm": self.algorithm,
            "wrong": self.wrong,
            "refused": self.refused,
        }
        return named if self.refused else named | self._figures()

    def _figures(self) -> dict[str, Any]:
        spread, workload = Spread.of(self.rounds), self.workload
        algbw, busbw = traits.bandwidths(
            workload.collective, workload.size, spread.median, workload.ranks
        )
        cuts = statistics.quantiles(self.times, n=100, method="inclusive")
        copied = statistics.median(self.copies) / spread.median if self.copies else None
        return {
            "calls_a_round": self.calls,
            "rounds_s": self.rounds,
            "median_s": spread.median,
            "low_s": spread.low,
            "high_s": spread.high,
            "calls_p10_p50_p90_p99_s": [cuts[i - 1] for i in (10, 50, 90, 99)],
            "algbw_gb_per_s": algbw,
            "busbw_gb_per_s": busbw,
            "copies_s": self.copies,
            # The time of its copies as a part of its own, 1.0 where it does nothing else.
            "of_its_copies": copied,
            "others_share": self.others,
            "doubts": trust.doubts(self.others, spread),
        }


Facts = dict[str, Any]  # what `Sample.facts` returns


def write_csv(path: Path, samples: Sequence[Facts]) -> None:
    """Write a line a sample; times are in microseconds, bandwidths in 10⁹ bytes a second."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([f"{name} ({UNITS[name]})" if name in UNITS else name for name in CSV])
        for sample in samples:
            cells = []
            for name, key in CSV.items():
                value = sample.get(key)
                cells.append(1e6 * value if UNITS.get(name) == "us" and value else value)
            writer.writerow(cells)


def peer_of(backends: Sequence[str]) -> str | None:
    """Return the backend that the others are compared with: Gloo, or the last one."""
    if len(backends) < 2:
        return None
    return "gloo" if "gloo" in backends else backends[-1]


class Table:
    """A table as nccl-tests print it, a line a backend and size, which grows while it is shown."""

    def __init__(
        self, workload: Workload, backends: Sequence[str], loads: bool, markdown: bool
    ) -> None:
        self.places = traits.IN_PLACE[workload.collective]
        self.loads, self.markdown = loads, markdown
        self.moves = workload.count > 0
        self.peer = peer_of(backends)
        self.copies = "ringcomm" in backends and workload.form.device == "cpu"
        first = [("backend", "", max(7, *map(len, backends))), *COLUMNS] + [("load", "", 4)] * loads
        last = [("copies", "of time", 7)] * self.copies + [("vs idle", "times", 7)] * loads
        if self.peer:
            last.insert(self.copies, (f"vs {self.peer}", "times", max(7, 3 + len(self.peer))))
        last.append(("doubt", "", 11))
        columns = first + PLACE * len(self.places) + last
        self.names, self.units, self.widths = map(list, zip(*columns, strict=True))
        self.left = sum(width + 2 for _, _, width in first)

    def head(self) -> list[str]:
        """Return the lines above the figures."""
        if self.markdown:
            units = zip(self.names, self.units, strict=True)
            names = [f"{name} ({unit})" if unit else name for name, unit in units]
            self.widths = [max(w, len(n)) for w, n in zip(self.widths, names, strict=True)]
            marks = ["-" * (w - bool(i)) + ":" * bool(i) for i, w in enumerate(self.widths)]
            return [self._line(names), self._line(marks)]
        titles = ["in place" if place else "out of place" for place in self.places]
        width = sum(width + 2 for _, _, width in PLACE)
        above = " " * self.left + "".join(title.center(width) for title in titles * self.moves)
        return [above.rstrip(), self._line(self.names), self._line(self.units)]

    def rows(self, samples: Sequence[Facts]) -> list[str]:
        """Return a line for each backend and load; the samples are of one size."""
        first = [sample for sample in samples if sample["in_place"] == self.places[0]]
        lines = []
        for sample in first:
            same = [
                s
                for s in samples
                if (s["backend"], s["loaded"]) == (sample["backend"], sample["loaded"])
            ]
            lines.append(self._line(self._cells(same, first)))
        return lines

    def _cells(self, same: Sequence[Facts], first: Sequence[Facts]) -> list[str]:
        sample = same[0]
        cells = [str(sample[key]) for key in ("backend", "bytes", "count", "type", "redop")]
        cells += ["busy" if sample["loaded"] else "idle"] * self.loads
        for place in same:
            if place["refused"]:
                cells += ["refused", "", "", "", ""]
                continue
            times = [show_time(place[key]) for key in ("median_s", "low_s", "high_s")]
            bandwidths = [show_bandwidth(place[f"{name}_gb_per_s"]) for name in ("algbw", "busbw")]
            wrong = UNMEASURED if place["wrong"] is None else str(place["wrong"])
            cells += [times[0], f"{times[1]}..{times[2]}", *bandwidths, wrong]
        if self.copies:
            part = sample.get("of_its_copies")
            cells.append(f"{part:.0%}" if part else "-")
        others = {(s["backend"], s["loaded"]): s.get("median_s") for s in first}
        if self.peer:
            known = sample["backend"] != self.peer
            cells.append(times_as(sample, others[self.peer, sample["loaded"]] if known else None))
        if self.loads:
            idle = others[sample["backend"], False]
            known = sample["loaded"] and idle and not sample["refused"]
            cells.append(f"{sample['median_s'] / idle:.2f}x" if known else "-")
        told = dict.fromkeys(doubt for place in same for doubt in place.get("doubts", []))
        cells.append(next(iter(told), "-"))
        return cells

    def _line(self, cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, self.widths, strict=True))
        ]
        if self.markdown:
            return f"| {' | '.join(padded)} |"
        return "  ".join(padded).rstrip()


def times_as(sample: Facts, seconds: float | None) -> str:
    """Return how many times as fast it is as one that takes `seconds`; "-" where it is unknown."""
    if not seconds or sample["refused"]:
        return "-"
    return f"{seconds / sample['median_s']:.2f}x"
