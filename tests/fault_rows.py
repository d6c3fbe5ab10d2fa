"""All rows of the fault table."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from fault_network import NETWORK
from fault_table import Fault

ROWS: list[Fault] = [*NETWORK]
if find_spec("fault_ranks"):
    ROWS += importlib.import_module("fault_ranks").RANKS
