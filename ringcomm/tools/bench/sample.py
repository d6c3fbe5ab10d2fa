"""A measured size of a collective: its figures, as JSON, as CSV and as lines of a table."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringcomm.tools.bench import cases
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


@dataclass(frozen=True)
class Job:
    """What is called: a collective of so many elements, between so many ranks, in a form."""

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
        return self.form.op if self.collective in cases.REDUCING else "none"


@dataclass
class Sample:
    """A job on one backend, idle or loaded. Times are in seconds."""

    job: Job
    backend: str
    loaded: bool = False
    algorithm: str = ""  # of ringcomm, where it is known
    calls: int = 0  # a round
    rounds: list[float] = field(default_factory=list)  # the median of each round's calls
    times: list[float] = field(default_factory=list)  # every call of every round
    copies: list[float] = field(default_factory=list)  # each round's: what its copies alone take
    wrong: int | None = None  # elements on all ranks; None: nobody looked
    refused: str = ""  # why the backend does not do that

    def add(self, times: list[float]) -> None:
        self.rounds.append(statistics.median(times))
        self.times += times

    def facts(self) -> dict[str, Any]:
        """Return what JSON gets."""
        job = self.job
        named = {
            "collective": job.collective,
            "backend": self.backend,
            "ranks": job.ranks,
            "device": job.form.device,
            "type": job.form.type,
            "redop": job.redop,
            "in_place": job.form.in_place,
            "bytes": job.size,
            "count": job.count,
            "loaded": self.loaded,
            "algorithm": self.algorithm,
            "wrong": self.wrong,
            "refused": self.refused,
        }
        return named if self.refused else named | self._figures()

    def _figures(self) -> dict[str, Any]:
        spread, job = Spread.of(self.rounds), self.job
        algbw, busbw = cases.bandwidths(job.collective, job.size, spread.median, job.ranks)
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
    """A table as nccl-tests print it, a line a backend and size, which grows while it is shown.

    Columns of bandwidth are in GB/s, those of time in µs.
    """

    def __init__(self, job: Job, backends: Sequence[str], loads: bool, markdown: bool) -> None:
        self.places, self.loads = cases.IN_PLACE[job.collective], loads
        self.moves = job.count > 0
        self.peer, self.markdown = peer_of(backends), markdown
        self.copies = "ringcomm" in backends and job.form.device == "cpu"
        self.widths = [max(7, *map(len, backends)), 8, 9, 8, 5] + [4] * loads
        self.names = ["backend", "size", "count", "type", "redop"] + ["load"] * loads
        self.units = ["", "B", "elements", "", "", ""][: len(self.names)]
        for _ in self.places:
            self.names += ["time", "lowest..highest", "algbw", "busbw", "#wrong"]
            self.units += ["µs", "µs", "GB/s", "GB/s", "elements"]
            self.widths += [9, 17, 7, 7, 8]
        for there, name, unit in (
            (self.copies, "copies", "of time"),
            (self.peer, f"vs {self.peer}", "times"),
            (loads, "vs idle", "times"),
        ):
            if there:
                self.names, self.units = [*self.names, name], [*self.units, unit]
                self.widths.append(max(7, len(name)))

    def head(self) -> list[str]:
        """Return the lines above the figures."""
        if self.markdown:
            units = zip(self.names, self.units, strict=True)
            names = [f"{name} ({unit})" if unit else name for name, unit in units]
            self.widths = [max(w, len(n)) for w, n in zip(self.widths, names, strict=True)]
            marks = ["-" * (w - bool(i)) + ":" * bool(i) for i, w in enumerate(self.widths)]
            return [self._line(names), self._line(marks)]
        left = sum(self.widths[: 5 + self.loads]) + 2 * (5 + self.loads)
        titles = ["in place" if place else "out of place" for place in self.places]
        titles = titles if self.moves else [""]
        width = sum([9, 17, 7, 7, 8]) + 2 * 5
        above = " " * left + "".join(title.center(width) for title in titles)
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
