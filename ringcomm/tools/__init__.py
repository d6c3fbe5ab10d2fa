"""The commands of `ringcomm`, a folder or a module each, and what they share.

arguments   the options that several commands have: one spelling for one thing
svg         the file and the marks of pictures
page        one HTML page with figures, which needs no network; the palette
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
