"""What an elastic world tells people: lines on stderr, as the library's."""

from __future__ import annotations

import os
import sys


def log(text: str) -> None:
    """Write a line to stderr as the library does, where RINGCOMM_LOG does not ask for less."""
    if os.environ.get("RINGCOMM_LOG") not in ("error", "off"):
        sys.stderr.write(f"ringcomm elastic: {text}\n")
