"""All rows of the fault table."""

from __future__ import annotations

from lab.faults.going_on import GOING_ON
from lab.faults.network import NETWORK
from lab.faults.ranks import RANKS
from lab.faults.table import Fault

ROWS: list[Fault] = [*NETWORK, *RANKS, *GOING_ON]
