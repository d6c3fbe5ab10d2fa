"""What the commands of `ringcomm` share.

arguments       the options that several commands have
svg             the file and the marks of pictures
page            one HTML page with figures, which needs no network
records         flight records: what each rank called, as ring files have it
flight_recorder the same in the schema of PyTorch's flight recorder
trace           `ringcomm trace`: what went wrong in a job
"""

from __future__ import annotations

import importlib
from typing import Any


def extra(module: str) -> Any:
    """Import a module that comes with `ringcomm[tools]`. Raises ValueError where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"this needs {module.partition('.')[0]}: run `pip install 'ringcomm[tools]'`"
        ) from error
