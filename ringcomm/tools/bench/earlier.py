"""Figures of an earlier run, as `ringcomm bench --json` has written them.

Files that were written before there were types and forms lack what was always the same then: sums
of float32 on the CPU, in the first place that a collective has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ringcomm.tools.bench import cases, collectives, ddp

OLD_STEPS = "ddp_step"  # such a file has one number of ranks
WRITTEN = "`ringcomm bench --json` writes"
ENDS = ("median_s", "low_s", "high_s")
FIGURES = (*ENDS, "algbw_gb_per_s", "busbw_gb_per_s")


def read(paths: Sequence[Path]) -> dict[str, Any]:
    """Return what a run wrote. Raises ValueError, and OSError, with one sentence why not."""
    if len(paths) > 1:
        raise ValueError("--from takes one file: those of two runs or machines do not compare")
    (path,) = paths
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no JSON, which {WRITTEN}") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise ValueError(several(path)) from error
        raise ValueError(f"{path} is no whole JSON: line {error.lineno}: {error.msg}") from error
    if isinstance(body, list) and any(isinstance(one, dict) and "machine" in one for one in body):
        raise ValueError(several(path))
    if not isinstance(body, dict) or "benchmark" not in body:
        raise ValueError(f"{path} is not what {WRITTEN}")
    kinds = {collectives.NAME: of_collectives, ddp.NAME: of_steps, OLD_STEPS: of_old_steps}
    if str(body["benchmark"]) not in kinds:
        raise ValueError(f"{path} is of another benchmark, {body['benchmark']!r}")
    try:
        return kinds[body["benchmark"]](body)
    except LackError as error:
        raise ValueError(f"{path}: {error}") from error


def several(path: Path) -> str:
    return f"{path} holds several results: those of two runs or machines do not compare"


class LackError(ValueError):
    """Something is missing in a file, or is not what it should be."""


def of_collectives(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with all that newer files have. Raises LackError."""
    need(body, "the file", {"machine": dict, "options": dict, "samples": list})
    need(body["options"], "the object 'options'", {"rounds": int})
    if not body["samples"]:
        raise LackError("it has no samples")
    options = {"device": "cpu"} | body["options"]
    samples = [
        whole(sample, f"sample {number}") for number, sample in enumerate(body["samples"], 1)
    ]
    return body | {"options": options, "samples": samples}


def whole(sample: Any, name: str) -> dict[str, Any]:
    """Return a sample with all that newer ones have. Raises LackError."""
    need(sample, name, {"collective": str, "backend": str, "ranks": int, "bytes": int})
    collective = sample["collective"]
    if collective not in cases.FACTORS:
        raise LackError(f"{name} is of an unknown collective, {collective!r}")
    made: dict[str, Any] = {
        "device": "cpu",
        "type": "float32",
        "redop": "sum" if collective in cases.REDUCING else "none",
        "in_place": cases.IN_PLACE[collective][0],
        "count": sample["bytes"] // cases.ELEMENT,
        "loaded": False,
        "algorithm": "",
        "wrong": None,
        "refused": "",
        "copies_s": [],
        "of_its_copies": None,
    } | sample
    texts = dict.fromkeys(("device", "type", "redop", "algorithm", "refused"), str)
    need(made, name, {**texts, "in_place": bool, "loaded": bool, "copies_s": list})
    positive(made, name, ["ranks"])
    if made["bytes"] < 0 or not isinstance(made["wrong"], int | None):
        raise LackError(f"{name} has impossible numbers")
    need({"copies": made["of_its_copies"] or 0}, name, {"copies": float})
    if not made["refused"]:
        need(made, name, dict.fromkeys(FIGURES, float))
        positive(made, name, ENDS)
    return made


def of_steps(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body as it is. Raises LackError."""
    need(body, "the file", {"machine": dict, "options": dict, "runs": list})
    options = dict.fromkeys(("batch", "rounds", "steps"), int)
    need(body["options"], "the object 'options'", {**options, "device": str})
    if not body["runs"]:
        raise LackError("it has no runs")
    for number, run in enumerate(body["runs"], 1):
        own = {"ranks": int, "parameters": int, "backends": dict, "exposed_vs_gloo": dict}
        need(run, f"run {number}", own)
        for backend, figures in run["backends"].items():
            keys = [f"{what}_{end}" for what in ddp.STEPS for end in ENDS]
            need(figures, f"{backend} of run {number}", dict.fromkeys(keys, float))
        compared = run["exposed_vs_gloo"]
        need(compared, f"'exposed_vs_gloo' of run {number}", dict.fromkeys(compared, float))
    return body


def of_old_steps(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with its one run as newer files have it. Raises LackError."""
    keys = ("parameters", "backends", "exposed_vs_gloo", "parameters_equal")
    need(body, "the file", {"machine": dict, "options": dict, "backends": dict})
    need(body["options"], "the object 'options'", {"ranks": int})
    run = {"ranks": body["options"]["ranks"]} | {key: body[key] for key in keys if key in body}
    options = {"device": "cpu"} | body["options"]
    return of_steps(
        {"benchmark": ddp.NAME, "machine": body["machine"], "options": options, "runs": [run]}
    )


def need(there: Any, name: str, wanted: dict[str, type]) -> None:
    """Raise LackError unless all of these are there, of their types; an int is a float, too."""
    if not isinstance(there, dict):
        raise LackError(f"{name} is not what {WRITTEN}")
    for key, kind in wanted.items():
        if key not in there:
            raise LackError(f"{name} lacks {key!r}, which {WRITTEN}")
        value = there[key]
        numbers = isinstance(value, (int, float)) and not isinstance(value, bool)
        fits = numbers and math.isfinite(value) if kind is float else isinstance(value, kind)
        if not fits:
            raise LackError(f"{key!r} of {name} is {value!r}")


def positive(there: dict[str, Any], name: str, keys: Iterable[str]) -> None:
    for key in keys:
        if there[key] <= 0:
            raise LackError(f"{key!r} of {name} is {there[key]!r}")
