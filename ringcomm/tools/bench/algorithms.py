"""Which algorithm ringcomm takes for a collective on this host."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

from ringcomm._network.costs import read
from ringcomm.algorithms.call import call_of
from ringcomm.algorithms.steps import plan_of


@functools.cache
def algorithm(collective: str, size: int, ranks: int) -> str:
    """Return "direct", "ring", …; "" where it is not known.

    `size` is in bytes, of the larger buffer. The ranks reach one another's memory, unless
    RINGCOMM_TRANSPORT has them use TCP.
    """
    if collective == "send_recv":
        return ""
    tcp = os.environ.get("RINGCOMM_TRANSPORT") == "tcp"
    costs = os.environ.get("RINGCOMM_COSTS")
    network = read(Path(costs) if costs else None)
    try:
        call = call_of(collective, ranks, size, hosts=ranks if tcp else 1)
    except ValueError:  # no plan has such a message
        return ""
    asked = os.environ.get("RINGCOMM_ALGORITHM", "")
    # As the library: what needs mapped memory, or several ranks on several hosts, is ignored here.
    if asked and asked != "hierarchical" and not (tcp and asked == "direct"):
        with contextlib.suppress(ValueError):  # nor is what the collective does not have
            return plan_of(call, 0, asked, network).algorithm
    return plan_of(call, 0, None, network).algorithm
