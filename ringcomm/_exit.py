"""The end of a program that has not destroyed its groups.

Pending operations must end before Python does, because their tensors and callbacks are Python's.
"""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any


def fatal_error() -> str:
    """Return what ends the program, as Python leaves it for its handlers at exit; else ""."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    if error is None:
        return ""
    name = type(error).__name__
    try:
        text = str(error).partition("\n")[0]
        text.encode()
    except Exception:  # noqa: BLE001 - its __str__ raises, or yields no UTF-8
        return name
    return f"{name}: {text}" if text else name


@functools.cache
def close_groups_with(library: Any) -> None:
    """Have the library close all groups when the program ends."""

    def close() -> None:
        error = fatal_error()
        try:
            from ringcomm import _flight

            _flight.stop()
            if error:
                _flight.dump_after(f"the program ends with {error}")
        finally:
            library.close_groups(error)

    atexit.register(close)
