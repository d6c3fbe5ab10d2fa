"""The result of gpu_check.py: one archive with the report, the tables and the stages' output.

It is written anew after each stage. So there is one also where the program is ended from outside.
"""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import gpu.table
from gpu.running import Outcome
from gpu.stages import STAGES, names_of

LARGEST = 4 << 20  # bytes of a file: of a longer one the end
TOP = "gpu_check"  # the folder in it
LOGS, TABLES = (".log",), (".txt", ".json")


class Archive:
    """The file `out/gpu_check-DATE.tar.gz`, made of what lies in `folder`."""

    def __init__(self, out: Path, folder: Path) -> None:
        self._folder = folder
        out.mkdir(parents=True, exist_ok=True)
        name = f"gpu_check-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.tar.gz"
        self.path = out.resolve() / name

    def write(self, outcomes: list[Outcome], facts: dict[str, Any]) -> str:
        """Write the report in its three forms, and pack everything; returns it as text."""
        ordered = sorted(outcomes, key=lambda outcome: STAGES.index(outcome.stage))
        rows = [row for outcome in ordered for row in outcome.rows]
        stages = [outcome.facts() for outcome in ordered]
        text = gpu.table.to_text(rows) + left_out(ordered)
        for name, form in (
            ("report.txt", text),
            ("report.json", gpu.table.to_json(rows, facts, stages)),
        ):
            (self._folder / name).write_text(form, encoding="utf-8")
        gpu.table.to_page(rows, facts, stages, self._folder / "report.html")
        self._pack()
        return text

    def _pack(self) -> None:
        unfinished = self.path.with_name(f".{self.path.name}")
        with tarfile.open(unfinished, "w:gz") as archive:
            for path in sorted(self._folder.rglob("*")):
                if name := place_of_file(path.relative_to(self._folder)):
                    data = path.read_bytes()[-LARGEST:]
                    entry = tarfile.TarInfo(f"{TOP}/{name}")
                    entry.size, entry.mtime = len(data), int(path.stat().st_mtime)
                    archive.addfile(entry, io.BytesIO(data))
        unfinished.replace(self.path)


def place_of_file(path: Path) -> str:
    """Return where a file of the working folder goes; "": it does not."""
    if path.name.startswith("report."):
        return path.name
    if path.suffix in LOGS:
        return f"logs/{path.name}"
    return f"tables/{path.name}" if path.suffix in TABLES else ""  # rows are in the report


def left_out(outcomes: list[Outcome]) -> str:
    """Return a line that says how to run what was left out; "" where nothing was."""
    names = names_of(outcome.stage for outcome in outcomes if outcome.left_out)
    return f"\nleft out, for another call: --only {','.join(names)}\n" if names else ""
