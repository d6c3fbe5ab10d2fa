"""How stages run: each as a process of its own, with a limit, and all of them within a time.

Each row is written down as it comes, so a stage that is ended at its limit leaves those that it
had. Nothing that a stage started outlives it: all of it is one session, which is ended by its id.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu.table
from gpu.stages import FOLDER, Settings, Stage
from gpu.table import Row

TAIL = 40  # lines of a stage's output that are kept when it fails
SIMULATED_TIMES = 8  # as long may a stage take on the simulated device, on whatever machine
GRACE = 5.0  # seconds in which a stage that is ended may end what it has started


@dataclass
class Outcome:
    """How a stage ended."""

    stage: Stage
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0
    status: str = "ended"  # or why not
    output: list[str] = field(default_factory=list)

    @property
    def left_out(self) -> bool:
        return self.status.startswith("left out")

    def facts(self) -> dict[str, Any]:
        failing = any(row.verdict == gpu.table.FAIL for row in self.rows)
        return {
            "stage": self.stage.name,
            "ranks": self.stage.ranks,
            "decides": self.stage.decides,
            "expected_s": self.stage.seconds,
            "seconds": round(self.seconds, 1),
            "status": self.status,
            "rows": len(self.rows),
            "output": self.output if failing or self.status != "ended" else [],
        }


class Running:
    """A stage in a process of its own, the first of a new session."""

    def __init__(self, stage: Stage, settings: Settings, left: float) -> None:
        hangs = stage.limit * (SIMULATED_TIMES if settings.simulated else 1)
        self.stage, self.limit, self._hangs = stage, min(left, hangs), left >= hangs
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
        if not over:
            os.kill(self._process.pid, signal.SIGTERM)
            end = time.monotonic() + GRACE
            while not self.over() and time.monotonic() < end:
                time.sleep(0.02)
        os.killpg(self._process.pid, signal.SIGKILL)  # the session's other processes too
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:  # a driver may keep it, and we have no time for that
            code = -signal.SIGKILL
        rows = gpu.table.load(self._rows)
        output = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        outcome = Outcome(self.stage, rows, seconds, output=output)
        if not over:
            self._cut(outcome)
        elif code != 0:
            said = gpu.table.first_line(output[-1]) if output else "it said nothing"
            outcome.status = f"status {code}"
            rows.append(gpu.table.failed("the whole stage", f"status {code}: {said}"))
        elif not rows:
            rows.append(gpu.table.failed("the whole stage", "it yielded nothing"))
        outcome.rows = [dataclasses.replace(row, stage=self.stage.name) for row in rows]
        return outcome

    def _cut(self, outcome: Outcome) -> None:
        """Tell a stage that hangs from one for which no time was left."""
        until = f"{len(outcome.rows)} rows until then"
        if self._hangs:
            outcome.status = f"ended at its limit of {self.limit:.0f} s"
            outcome.rows.append(gpu.table.failed("the whole stage", f"{outcome.status}; {until}"))
        else:
            outcome.status = f"cut short after {outcome.seconds:.0f} s: the time was over"
            outcome.rows.append(
                gpu.table.info("the whole stage", note=f"{outcome.status}; {until}")
            )


def run_stages(
    stages: list[Stage], settings: Settings, end: float | None = None, at_once: int = 1
) -> Iterator[Outcome]:
    """Run what still fits before `end`, a time.monotonic(); yield how each stage ended.

    In order: a stage begins if what it takes as a rule is left, and else is left out. So stages
    that were faster than expected make room for later ones.
    """
    waiting, running = list(stages), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                stage = waiting.pop(0)
                left = float("inf") if end is None else end - time.monotonic()
                if left < stage.seconds:
                    note = f"left out: it takes {stage.seconds:.0f} s, and {max(0, left):.0f} s"
                    yield Outcome(stage, status=f"{note} were left")
                    continue
                running.append(Running(stage, settings, left))
            for started in [run for run in running if run.over() or run.late()]:
                running.remove(started)
                yield started.finish()
            time.sleep(0.05)
    finally:
        for started in running:
            started.finish()
