"""The stages of gpu_check.py, their order, and which of them fit into some minutes.

First comes what a machine with one GPU is asked in three calls (CALLS), so the answers that matter
come first whatever time there is. The rest is breadth first: everything with 2 ranks, then with 4,
and so on. A stage is a generator of rows, and runs as a process of its own: see running.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu.table
from gpu.table import Row

FOLDER = Path(__file__).resolve().parent.parent  # benchmarks/
ROOT = FOLDER.parent
MARGIN_SECONDS = 30  # that a stage may take besides twice what it takes as a rule


@dataclass(frozen=True)
class Settings:
    """The settings of a stage."""

    simulated: bool
    short: bool  # the least that shows that a stage works
    library: str  # simulated: the one that stands in; else a prebuilt one, or ""
    probe: str  # a prebuilt one, or ""
    build: bool  # ringcomm, from this source; else the one that is installed
    folder: str  # for what stages write

    @property
    def kind(self) -> str:
        """The kind of place where tensors are: see gpu.ranks.Place."""
        return "simulated" if self.simulated else "cuda"

    def pick(self, real: Any, simulated: Any, short: Any) -> Any:
        """Choose by what this run is."""
        return real if not self.simulated else short if self.short else simulated

    @property
    def tables(self) -> Path:
        """Return the folder for tables of figures, which go into the archive."""
        folder = Path(self.folder) / "tables"
        folder.mkdir(exist_ok=True)
        return folder


Function = Callable[[Settings, int], Iterator[Row]]


@dataclass(frozen=True)
class Stage:
    """One kind of check for one number of ranks; `where` is module.function."""

    kind: str
    ranks: int  # 0: it has none
    seconds: float  # that it takes on a machine with a GPU, about
    where: str
    decides: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.ranks}" if self.ranks else self.kind

    @property
    def limit(self) -> float:
        """Return the seconds after which it hangs."""
        return 2 * self.seconds + MARGIN_SECONDS

    def function(self) -> Function:
        module, _, name = self.where.rpartition(".")
        loaded: Function = getattr(importlib.import_module(module), name)
        return loaded


# kind, function, seconds by number of ranks (expected, none is measured), what it decides
KINDS: list[tuple[str, str, dict[int, int], str]] = [
    ("facts", "gpu.build.facts", {0: 30}, "what the machine is, and what it lacks"),
    ("build", "gpu.build.build", {0: 150}, "whether this source builds there"),
    ("probe", "gpu.build.probe", {2: 50, 4: 50, 8: 60, 16: 80},
     "what the driver does with processes that share a GPU (gpu/probe.cu)"),
    ("torch", "gpu.behaviour.checks", {2: 75, 4: 45, 8: 60},
     "streams, futures, groups, memory, DDP and FSDP"),
    ("graphs", "gpu.graphs.graphs", {2: 40, 4: 40, 8: 50},
     "capture into CUDA graphs: same bits, and what it saves"),
    ("kernels", "gpu.kernels.kernels", {2: 30, 4: 30, 8: 40},
     "kernels of ranks with a device each, as streams of one process"),
    ("meetings", "gpu.plans.meetings", {2: 60, 4: 60},
     "kernels that meet, between processes that take one GPU for one each"),
    ("plans", "gpu.plans.plans", {2: 50, 4: 60, 8: 90, 16: 120},
     "every collective, bit for bit as plans on the CPU"),
    ("faults", "gpu.faults.faults", {2: 50, 4: 50}, "deaths, mismatches, ranks that never come"),
    ("bandwidth", "gpu.speed.bandwidth", {2: 40, 4: 40, 8: 50, 16: 40},
     "large operations as shares of a copy"),
    ("latency", "gpu.speed.latency", {2: 25, 4: 25, 8: 30}, "small operations, and enqueueing"),
    ("bench", "gpu.commands.bench", {2: 60, 4: 60, 8: 90}, "nccl-tests' columns, NCCL beside"),
    ("ddp", "gpu.commands.ddp", {2: 50, 4: 40}, "what a DDP step waits for, by backend"),
    ("mps", "gpu.mps.mps", {2: 60}, "what NVIDIA's multi-process service changes"),
    ("fsdp2", "gpu.commands.fsdp2", {2: 45, 4: 45, 8: 60}, "what an FSDP2 step waits for"),
    ("tune", "gpu.commands.tune", {4: 25, 8: 35}, "each kernel's times, and the rules of them"),
    ("cpu", "gpu.commands.cpu", {2: 25, 4: 30, 8: 40, 16: 60}, "ranks on the CPU, beside Gloo"),
    ("memcheck", "gpu.faults.memcheck", {2: 170}, "accesses outside of memory"),
    ("racecheck", "gpu.faults.racecheck", {2: 170}, "threads of a block that race"),
    ("synccheck", "gpu.faults.synccheck", {2: 170}, "barriers in kernels that are used wrongly"),
]  # fmt: skip


# Three calls of eight minutes for a machine with one GPU, by what they are expected to take. Each
# may take a minute more, so that they end within ten with all that surrounds them.
CALLS = {
    1: ["facts", "probe-2", "torch-2", "kernels-2", "kernels-4", "kernels-8", "plans-2", "faults-2",
        "graphs-2", "latency-2"],
    2: ["meetings-2", "meetings-4", "plans-4", "torch-4", "graphs-4", "faults-4", "bandwidth-2",
        "latency-4"],
    3: ["memcheck-2", "plans-8", "bandwidth-8", "latency-8", "mps-2"],
}  # fmt: skip
CALL_SECONDS, CALL_MINUTES = 8 * 60, 9.0
INSTEAD = {"memcheck-2": ["probe-8", "ddp-2"]}  # where the kernel is gVisor, which has no debugger


def in_order(kinds: Iterable[tuple[str, str, dict[int, int], str]]) -> list[Stage]:
    """Return the stages: those of the calls; then by number of ranks, in the order of the kinds."""
    stages = [
        Stage(kind, ranks, seconds, where, decides)
        for kind, where, taken, decides in kinds
        for ranks, seconds in taken.items()
    ]
    first = [name for names in CALLS.values() for name in names]
    first.insert(1, "build")  # where it is wanted, nothing goes without it
    place = {name: number for number, name in enumerate(first)}
    return sorted(stages, key=lambda stage: (place.get(stage.name, len(place)), stage.ranks))


STAGES = in_order(KINDS)


def of_call(number: int) -> list[str]:
    """Return the names of the stages of a call on this machine."""
    release = os.uname().release.lower()
    sandboxed = release == "4.4.0" or "gvisor" in release  # as gVisor calls itself
    names = CALLS[number]
    return [s for name in names for s in (INSTEAD.get(name, [name]) if sandboxed else [name])]


# Stages that tell most of a machine with a GPU a rank, and those that only it runs unasked.
OF_NODES = ["facts", "build", "plans", "latency", "bench", "tune", "fsdp2"]
ONLY_NODES = ["fsdp2", "tune"]
RANKS = sorted({stage.ranks for stage in STAGES} - {0})


def by_name(name: str) -> Stage:
    return next(stage for stage in STAGES if stage.name == name)


def names_of(stages: Iterable[Stage]) -> list[str]:
    return [stage.name for stage in stages]


def unknown(names: Iterable[str]) -> list[str]:
    """Return those that name neither a kind nor a stage."""
    known = {stage.kind for stage in STAGES} | set(names_of(STAGES))
    return [name for name in names if name not in known]


def chosen(only: list[str], without: list[str], ranks: Iterable[int]) -> list[Stage]:
    """Return the stages to run; names are of kinds ("plans") or of stages ("plans-4")."""
    of_ranks = {0, *ranks}
    return [
        stage
        for stage in STAGES
        if (stage.ranks in of_ranks or stage.name in only)
        and (not only or not {stage.kind, stage.name}.isdisjoint(only))
        and {stage.kind, stage.name}.isdisjoint(without)
    ]


def fitting(stages: Iterable[Stage], seconds: float) -> tuple[list[Stage], list[Stage]]:
    """Return what fits into so many seconds, as far as one knows before, and what is left out."""
    fit: list[Stage] = []
    left_out: list[Stage] = []
    for stage in stages:
        fits = stage.seconds <= seconds
        (fit if fits else left_out).append(stage)
        seconds -= stage.seconds if fits else 0
    return fit, left_out


# ---- in the stage's own process


def parts(*functions: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yield the rows of each part; one that fails is a row, and does not stop the next."""
    for function in functions:
        name = getattr(function, "__name__", "") or getattr(function, "func", function).__name__
        try:
            yield from function()
        except Exception as error:  # noqa: BLE001  whatever it is, it goes into the table
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            yield gpu.table.failed(name.strip("_").replace("_", " "), last_line(error))


def of_a_rival(what: str, function: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Yield its rows; if it fails, that is information: it is not ours."""
    try:
        yield from function()
    except Exception as error:  # noqa: BLE001  its own words are the row
        print(f"{what}: {error}", flush=True)
        yield gpu.table.info(what, note=f"it fails: {last_line(error)}")


def last_line(error: BaseException) -> str:
    """Return the line that says most: of a text with a traceback, the last."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [repr(error)]
    traced = any(line.startswith("Traceback") or "Traceback (" in line for line in lines)
    return gpu.table.first_line(lines[-1] if traced else lines[0])


def run_here(name: str, settings: Settings, rows: Path) -> None:
    """Run a stage in this process, and write its rows down as they come.

    At its limit it gets SIGTERM, and ends what it has started in the usual way.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    stage = by_name(name)
    for row in stage.function()(settings, stage.ranks):
        row = dataclasses.replace(row, stage=name)
        gpu.table.append(rows, row.unjudged() if settings.simulated else row)
