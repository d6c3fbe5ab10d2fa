"""Algorithms by hand for the commands: a function of a file, and its plans as data."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import cast

from ringcomm.algorithms import Algorithm
from ringcomm.algorithms.proof import SLOTS, given_of, shape_of, steps_of
from ringcomm.algorithms.schedule import schedule
from ringcomm.algorithms.steps import Shape
from ringcomm.options import ALGORITHMS
from ringcomm.tools.plan.tables import GroupPlans, tables_of

Asked = str | Algorithm | None
"""A name, "FILE.py:FUNCTION" or a function; None: by the library's table."""


def load(text: str) -> Algorithm:
    """Return the function that "FILE.py:FUNCTION" names. Raises ValueError."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise ValueError(f"{text}: write FILE.py:FUNCTION, with a file that is there")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{text}: {path.name} has no function {name!r}")
    return cast(Algorithm, getattr(module, name))


def function_of(asked: Asked) -> Algorithm | None:
    """Return the function that is asked for; None: an algorithm of the library. Raises ValueError.

    Names of the library have no colon, and no file is read for them.
    """
    if isinstance(asked, str):
        return load(asked) if ":" in asked else None
    return asked


def name_of(algorithm: Algorithm) -> str:
    """Return the function's name, with "by hand" where the library has an algorithm of that name.

    A file of plans takes letters, digits and underscores of ASCII, so others are underscores here.
    """
    name = re.sub(r"\W", "_", getattr(algorithm, "__name__", "by_hand"), flags=re.ASCII)[:40]
    return f"{name} by hand" if name in ALGORITHMS else name


def of_hand(shape: Shape, algorithm: Algorithm) -> GroupPlans:
    """Return the plans of an algorithm by hand; they are not proved.

    Raises AlgorithmError with the line of its code, and ValueError where it takes no such call.
    """
    size = shape.bytes or sum(shape.shards or shape.send)
    if len(set(shape.send)) > 1:
        raise ValueError(f"{size} bytes for {shape.size} ranks: parts must be equal, by hand")
    mapped = shape.hosts == 1
    given = given_of(
        shape.name, shape.size, size, shape.element, shape.root, shape.local, mapped
    )  # fmt: skip
    scripts = schedule(algorithm, shape_of(given), given[-1][SLOTS])
    plans = [tables_of(steps_of(given, scripts, rank)) for rank in range(shape.size)]
    return GroupPlans(shape._replace(word="", names=[]), name_of(algorithm), tuple(plans))
