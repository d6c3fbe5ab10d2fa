"""How the script of a benchmark runs; `ringcomm.tools.bench.measured` takes its measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from lab.hosts import Hosts

__all__ = [
    "BenchmarkError",
    "BusyCores",
    "Measured",
    "ask_ranks",
    "join",
    "leave",
    "main",
    "prepare",
    "slowest",
    "spread",
]


def main(run: Callable[[Any], None], options: Any) -> int:
    """Run a benchmark; returns its exit status. A rank's error is told in its own words."""
    try:
        run(options)
    except (BenchmarkError, RankError) as error:
        report.progress("")
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # as shells have it
    return 0


def ask_ranks(
    hosts: Hosts, script: str, local: int, env: dict[str, str] | None = None, seconds: float = 500
) -> Any:
    """Run the script with `--as-rank`, `local` ranks on each host; returns what rank 0 says.

    That is a line of JSON. Ends the program with the ranks' words where there is none.
    """
    command = [sys.executable, script, "--as-rank", *sys.argv[1:]]
    ranks = hosts.run_ranks(command, local, env, timeout=seconds)
    lines = [line for line in ranks[0].output.splitlines() if line.startswith(("{", "[{"))]
    return json.loads(lines[-1]) if lines else sys.exit("\n".join(rank.output for rank in ranks))
