"""What an elastic world tells people: lines on stderr, as the library's."""

from __future__ import annotations

from ringcomm._runtime.options import log_level, say


def log(text: str) -> None:
    """Write a line to stderr as the library does, where RINGCOMM_LOG does not ask for less."""
    if log_level() not in ("error", "off"):
        say(f"elastic: {text}")


def warn(text: str, who: str = "") -> None:
    """The same for a warning, where `who` says nothing one that is not about the world."""
    if log_level() not in ("error", "off"):
        say(f"WARNING{who and ' '}{who}: {text}")
