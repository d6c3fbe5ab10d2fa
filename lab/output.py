"""Wait for lines that a program prints into a file."""

from __future__ import annotations

import re
import time
from pathlib import Path

from lab.limits import limit


class Output:
    """A file that grows. Each `wait` begins where the one before has ended."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def text(self) -> str:
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def wait(self, pattern: str, seconds: float = 30) -> re.Match[str]:
        """Wait until it has a line that fits, after those that were awaited before."""
        deadline = time.monotonic() + limit(seconds)
        while True:
            text = self.text()
            if match := re.compile(pattern).search(text, self._at):
                self._at = match.end()
                return match
            assert time.monotonic() < deadline, f"{self.path.name} lacks {pattern}: {text[-3000:]}"
            time.sleep(0.05)
