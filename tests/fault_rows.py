"""All rows of the fault table."""

from __future__ import annotations

from fault_network import NETWORK
from fault_ranks import RANKS
from fault_table import Fault

ROWS: list[Fault] = [*NETWORK, *RANKS]
