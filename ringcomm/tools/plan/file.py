"""Plans of a group as a JSON file: docs/simulate.md has its keys.

A file is read as if an enemy had written it: each number is checked before it is used, and the
error names the place, as "plans[2].steps[17].peer". What is read can be run to its end: no wait is
without its signal, no byte outside of memory that the shape has.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from ringcomm.algorithms.steps import COLLECTIVES, LANES, MOST_RANKS, SPACES, VERBS, Shape
from ringcomm.tools.plan import check, of_mscclpp
from ringcomm.tools.plan.check import PlaceError
from ringcomm.tools.plan.tables import (
    Block,
    Extent,
    GroupPlans,
    Loop,
    Motion,
    Move,
    Ref,
    Tables,
)

FORMAT, VERSION = "ringcomm plans", 1
TABLES: dict[str, type[NamedTuple]] = {
    "loops": Loop,
    "blocks": Block,
    "steps": Move,
    "refs": Ref,
    "motions": Motion,
    "extents": Extent,
}
CHOICES = {"verb": VERBS, "space": SPACES, "lane": ("", *LANES)}
LENGTHS = ("shards", "send", "recv")
LARGEST = 1 << 62  # of any number: sums of a few stay below 2**64


# ---- writing


def write(group: GroupPlans, path: Path) -> None:
    """Write the plans. Raises OSError."""
    path.write_text(text_of(group), encoding="utf-8")


def text_of(group: GroupPlans) -> str:
    """Return the file's text: a line for each row, without what is at its default."""
    shape = group.shape
    head = {
        "format": FORMAT,
        "version": VERSION,
        "shape": {
            "collective": shape.name,
            "ranks": shape.size,
            "local": shape.local,
            "element": shape.element,
            "root": shape.root,
            "bytes": shape.bytes,
            **{name: getattr(shape, name) for name in LENGTHS},
        },
        "algorithm": group.algorithm,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    plans = ",\n".join(plan_text(plan) for plan in group.plans)
    return "{" + ",\n".join(lines) + ',\n"plans": [\n' + plans + "\n]}\n"


def plan_text(plan: Tables) -> str:
    parts = []
    for name in TABLES:
        rows = [json.dumps(row_of(row)) for row in getattr(plan, name)]
        parts.append(f'"{name}": [' + ("\n  " + ",\n  ".join(rows) if rows else "") + "]")
    return "{" + ",\n ".join(parts) + "}"


def row_of(row: Any) -> dict[str, Any]:
    defaults = row._field_defaults
    return {
        key: value
        for key, value in row._asdict().items()
        if key not in defaults or value != defaults[key]
    }


# ---- reading


def read(path: Path) -> GroupPlans:
    """Read and check the plans of a file, or those of MSCCL++ that ringcomm can say.

    Raises ValueError, which names the place, and OSError.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    try:
        return of_mscclpp.parse(body) if of_mscclpp.is_plan(body) else parse(body)
    except PlaceError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(body: Any) -> GroupPlans:
    """Return the plans of what JSON says. Raises PlaceError."""
    top = object_of(body, "the file", ("format", "version", "shape", "algorithm", "plans"))
    if top.get("format") != FORMAT:
        raise PlaceError("format", f'it must be "{FORMAT}"')
    if top.get("version") != VERSION or isinstance(top["version"], bool):
        raise PlaceError("version", f"this version of ringcomm reads version {VERSION}")
    shape = shape_of(top.get("shape"))
    algorithm = top.get("algorithm")
    if not isinstance(algorithm, str) or not re.fullmatch(r"[\w .:/-]{1,64}", algorithm, re.ASCII):
        raise PlaceError("algorithm", "it must be a name of up to 64 letters, digits and ' .:/-_'")
    plans = list_of(top.get("plans"), "plans")
    if len(plans) != shape.size:
        raise PlaceError("plans", f"there are {len(plans)}, and the shape has {shape.size} ranks")
    made = tuple(plan_of(one, f"plans[{rank}]") for rank, one in enumerate(plans))
    group = GroupPlans(shape, algorithm, made)
    check.check(group)
    return group


def object_of(value: Any, place: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlaceError(place, "it must be an object")
    for key in value:
        if key not in keys:
            raise PlaceError(place, f"there is no key {key!r}: use {', '.join(keys)}")
    return value


def list_of(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlaceError(place, "it must be a list")
    return value


def number_of(value: Any, place: str, least: int = 0, most: int = LARGEST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PlaceError(place, f"it must be a whole number from {least} to {most}")
    return value


def shape_of(value: Any) -> Shape:
    keys = ("collective", "ranks", "local", "element", "root", "bytes", *LENGTHS)
    given = object_of(value, "shape", keys)
    name = given.get("collective")
    if name not in COLLECTIVES:
        raise PlaceError("shape.collective", f"it must be one of {', '.join(COLLECTIVES)}")
    size = number_of(given.get("ranks"), "shape.ranks", 1, MOST_RANKS)
    local = number_of(given.get("local"), "shape.local", 1, size)
    if size % local:
        raise PlaceError("shape.local", f"{size} ranks are not hosts of {local} each")
    element = number_of(given.get("element"), "shape.element", 1, 16)
    root = number_of(given.get("root", 0), "shape.root", 0, size - 1)
    whole = number_of(given.get("bytes", 0), "shape.bytes")
    lengths: list[list[int]] = []
    for key in LENGTHS:
        found = list_of(given.get(key, []), f"shape.{key}")
        if found and len(found) != size:
            raise PlaceError(f"shape.{key}", f"it must have none, or one for each of {size} ranks")
        lengths.append([number_of(one, f"shape.{key}[{i}]") for i, one in enumerate(found)])
    shards, send, recv = lengths
    number = COLLECTIVES.index(name)
    return Shape(number, size, local, element, root, whole, shards, send, recv, "", [])


def plan_of(value: Any, place: str) -> Tables:
    given = object_of(value, place, tuple(TABLES))
    found = {}
    for name, kind in TABLES.items():
        where = f"{place}.{name}"
        rows = list_of(given.get(name, []), where)
        found[name] = tuple(row(kind, one, f"{where}[{i}]") for i, one in enumerate(rows))
    return Tables(**found)


def row(kind: Any, value: Any, place: str) -> Any:
    """Return a row of a table: every field of its type, and there unless it has a default."""
    given = object_of(value, place, kind._fields)
    values = {}
    for key in kind._fields:
        if key not in given:
            if key not in kind._field_defaults:
                raise PlaceError(place, f"it has no {key}")
            continue
        values[key] = field(key, given[key], f"{place}.{key}")
    return kind(**values)


def field(key: str, value: Any, place: str) -> Any:
    if key in CHOICES:
        if not isinstance(value, str) or value not in CHOICES[key]:
            raise PlaceError(
                place, f"it must be one of {', '.join(name for name in CHOICES[key] if name)}"
            )
        return value
    if key == "final":
        if not isinstance(value, bool):
            raise PlaceError(place, "it must be true or false")
        return value
    return number_of(value, place, -1 if key == "peer" else 0)
