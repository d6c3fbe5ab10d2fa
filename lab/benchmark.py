"""How the script of a benchmark runs; what it measures with is `ringcomm.tools.bench.measured`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import report
from ringcomm.tools.bench.measured import (
    BenchmarkError,
    BusyCores,
    Measured,
    join,
    leave,
    prepare,
    slowest,
    spread,
)
from ringcomm.tools.bench.ranks import RankError

__all__ = [
    "BenchmarkError",
    "BusyCores",
    "Measured",
    "join",
    "leave",
    "main",
    "prepare",
    "slowest",
    "spread",
]


def main(run: Callable[[Any], None], options: Any) -> int:
    """Run a benchmark; returns its exit status. What a rank met is told in its own words."""
    try:
        run(options)
    except (BenchmarkError, RankError) as error:
        report.progress("")
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as shells have it
    return 0
