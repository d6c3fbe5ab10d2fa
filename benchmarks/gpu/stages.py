"""What gpu_check.py consists of, and how a stage runs: as a process of its own, with a time limit.

A stage is a generator of rows. Each row is written down as it comes, so a stage that is ended at
its limit leaves those that it had. Nothing that a stage started outlives it: all of it is one
session, which is ended by its id.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu.table
from gpu.table import Row

FOLDER = Path(__file__).resolve().parent.parent  # benchmarks/
ROOT = FOLDER.parent
TAIL = 40  # lines of a stage's output that are kept when it fails


@dataclass(frozen=True)
class Settings:
    """What stages are told."""

    simulated: bool
    short: bool  # the least that shows that a stage works
    library: str  # simulated: the one that stands in; else a prebuilt one, or ""
    probe: str  # a prebuilt one, or ""
    build: bool  # ringcomm, from this source; else the one that is installed
    folder: str  # for what stages write

    @property
    def kind(self) -> str:
        """Of the places where tensors are: see gpu.ranks.Place."""
        return "simulated" if self.simulated else "cuda"

    def pick(self, real: Any, simulated: Any, short: Any) -> Any:
        """Choose by what this run is."""
        return real if not self.simulated else short if self.short else simulated


Function = Callable[[Settings], Iterator[Row]]


@dataclass(frozen=True)
class Stage:
    """`where` is module.function; `seconds` its limit on a machine with a GPU."""

    name: str
    group: int
    seconds: int
    where: str
    about: str

    def function(self) -> Function:
        module, _, name = self.where.rpartition(".")
        found: Function = getattr(importlib.import_module(module), name)
        return found


# The limits of a group add up to nine minutes at most.
STAGES = [
    Stage("build", 1, 300, "gpu.build.build", "the machine, what a build needs, the build"),
    Stage("probe", 1, 180, "gpu.build.probe", "what the GPU and its driver do (gpu/probe.cu)"),
    Stage("plans", 2, 270, "gpu.plans.plans", "every collective and algorithm as on the CPU"),
    Stage("torch", 2, 150, "gpu.behaviour.checks", "streams, futures, groups, DDP, FSDP"),
    Stage("faults", 2, 110, "gpu.faults.faults", "deaths, mismatches, ranks that never come"),
    Stage("bandwidth", 3, 120, "gpu.speed.bandwidth", "shares of the copy ceiling"),
    Stage("latency", 3, 50, "gpu.speed.latency", "small operations, and enqueueing"),
    Stage("symmetric", 3, 40, "gpu.speed.symmetric", "torch symmetric memory, where it runs"),
    Stage("ddp", 3, 150, "gpu.training.ddp", "what a DDP step waits for, by backend"),
    Stage("cpu", 3, 150, "gpu.training.cpu", "ranks on the CPU, beside Gloo"),
    Stage("sanitizer", 4, 520, "gpu.faults.sanitizer", "compute-sanitizer over a small run"),
]


def by_name(name: str) -> Stage:
    return next(stage for stage in STAGES if stage.name == name)


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


def last_line(error: BaseException) -> str:
    """Return the line that says most: of a text with a traceback, the last."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [repr(error)]
    traced = any(line.startswith("Traceback") or "Traceback (" in line for line in lines)
    return gpu.table.first_line(lines[-1] if traced else lines[0])


def run_here(name: str, settings: Settings, rows: Path) -> None:
    """Run a stage in this process, and write its rows down as they come."""
    for row in by_name(name).function()(settings):
        row = dataclasses.replace(row, stage=name)
        gpu.table.append(rows, row.unjudged() if settings.simulated else row)


# ---- in the process that runs them all


@dataclass
class Outcome:
    """How a stage ended."""

    stage: Stage
    rows: list[Row]
    seconds: float
    status: int | None  # None: it was ended at its limit
    output: list[str]

    def facts(self) -> dict[str, Any]:
        failing = self.status != 0 or any(row.verdict == gpu.table.FAIL for row in self.rows)
        return {
            "stage": self.stage.name,
            "seconds": round(self.seconds, 1),
            "status": "ended at its limit" if self.status is None else self.status,
            "rows": len(self.rows),
            "output": self.output if failing else [],
        }


class Running:
    """A stage in a process of its own, the first of a new session."""

    def __init__(self, stage: Stage, settings: Settings, limit: float) -> None:
        self.stage, self.limit = stage, limit
        folder = Path(settings.folder)
        self._rows, self._log = folder / f"{stage.name}.rows", folder / f"{stage.name}.log"
        self._rows.unlink(missing_ok=True)
        settings_text = json.dumps(dataclasses.asdict(settings))
        command = [sys.executable, str(FOLDER / "gpu_check.py"), "--stage", stage.name]
        command += ["--settings", settings_text]
        self._start = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--rows", str(self._rows)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            )

    def over(self) -> bool:
        """Has it ended? It is not reaped yet, so its id is still its own."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def late(self) -> bool:
        return time.monotonic() - self._start > self.limit

    def finish(self) -> Outcome:
        """End what is left of it, and say how it ended."""
        over, seconds = self.over(), time.monotonic() - self._start
        os.killpg(self._process.pid, signal.SIGKILL)  # the session's other processes too
        status = self._process.wait()
        rows = gpu.table.load(self._rows)
        output = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        outcome = Outcome(self.stage, rows, seconds, status if over else None, output)
        if not over:
            note = f"ended at its limit of {self.limit:.0f} s; {len(rows)} rows until then"
            rows.append(gpu.table.failed("the whole stage", note))
        elif status != 0:
            said = gpu.table.first_line(output[-1]) if output else "it said nothing"
            rows.append(gpu.table.failed("the whole stage", f"status {status}: {said}"))
        elif not rows:
            rows.append(gpu.table.failed("the whole stage", "it yielded nothing"))
        outcome.rows = [dataclasses.replace(row, stage=self.stage.name) for row in rows]
        return outcome


def run_stages(
    stages: list[Stage], settings: Settings, seconds: float, at_once: int = 1
) -> Iterator[Outcome]:
    """Run stages within `seconds`; yield how each ended. What no time is left for is a row too."""
    end = time.monotonic() + seconds
    waiting, running = list(stages), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                stage = waiting.pop(0)
                limit = min(stage.seconds, end - time.monotonic())
                if limit < 1:
                    note = f"not run: the {seconds:.0f} s for all stages were over"
                    row = dataclasses.replace(
                        gpu.table.failed("the whole stage", note), stage=stage.name
                    )
                    yield Outcome(stage, [row], 0, 0, [])
                    continue
                running.append(Running(stage, settings, limit))
            for one in [one for one in running if one.over() or one.late()]:
                running.remove(one)
                yield one.finish()
            time.sleep(0.05)
    finally:
        for one in running:
            one.finish()
