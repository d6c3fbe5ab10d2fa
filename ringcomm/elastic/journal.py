"""The journal that a rank writes of its training in a rehearsal: `ringcomm elastic rehearse`.

Each line is JSON, written at once, so that a killed process has written all of its lines. Times are
those of the host's steady clock. The rehearsal writes its faults into the same folder.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ringcomm.options import Variables

CHECKPOINTS = ".checkpoints"  # the part of a journal that says which of them were written
FULL = "disk-is-full"  # a file beside the journals, while checkpoints are to find the disk full


class Journal:
    """A file in the folder that the environment names; without one, nothing is written."""

    def __init__(self, part: str = "") -> None:
        folder = Variables.elastic_journal.read()
        self._file = -1
        if folder:
            path = Path(folder) / f"{os.getpid()}{part}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def writes(self) -> bool:
        return self._file >= 0

    def __call__(self, what: str, **more: Any) -> None:
        if self.writes:
            line = {"at": time.monotonic(), "what": what, "pid": os.getpid(), **more}
            os.write(self._file, json.dumps(line).encode() + b"\n")


def finds_disk_full() -> bool:
    """Tell whether a rehearsal wants the disk to be full for a checkpoint that begins now."""
    folder = Variables.elastic_journal.read()
    return bool(folder) and Path(folder, FULL).exists()


def read(folder: Path, part: str = "") -> list[dict[str, Any]]:
    """Return the lines of all ranks, or one part of each journal, by time."""
    lines = [
        json.loads(line)
        for path in folder.glob(f"*{part}.jsonl")
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]
    return sorted(lines, key=lambda line: float(line["at"]))
