"""Which algorithm ringcomm takes for a collective on this host."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from ringcomm.costs import ALGORITHMS
from ringcomm.tools.bench import cases

ROW = re.compile(
    r"(?P<what>\w+), (?:any size|up to (?P<most>\d+) B)(?:, (?P<needs>.*))?: (?P<by>\w+)"
)


@functools.cache
def table(ranks: int) -> list[re.Match[str]]:
    """Return the rows by which groups of so many ranks choose, in their order."""
    from ringcomm import _C

    costs = os.environ.get("RINGCOMM_COSTS", "")
    text = _C.selection_text(ranks, Path(costs).read_text(encoding="utf-8") if costs else "")
    return [row for line in text.splitlines() if (row := ROW.fullmatch(line))]


def algorithm(collective: str, size: int, ranks: int) -> str:
    """Return "direct", "ring", …; "" where it is not known.

    `size` is in bytes, of the larger buffer. The ranks reach one another's memory, unless
    RINGCOMM_TRANSPORT has them use TCP.
    """
    if collective == "send_recv":
        return ""
    asked = os.environ.get("RINGCOMM_ALGORITHM", "")
    if asked in ALGORITHMS.get(collective, ()):
        return asked
    tcp = os.environ.get("RINGCOMM_TRANSPORT") == "tcp"
    have = {None, "two ranks" if ranks == 2 else None, None if tcp else "mapped windows"}
    message = size // ranks if collective in cases.IN_PARTS else size
    for row in table(ranks):
        fits = row["most"] is None or message <= int(row["most"])
        if row["what"] == collective and fits and row["needs"] in have:
            return row["by"]
    return ""
