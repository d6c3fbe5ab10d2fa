"""The notebook of algorithms by hand: its format, and each cell in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.limits import limit

NOTEBOOK = ROOT / "examples" / "algorithms" / "by_hand.ipynb"
# Runs the cells of a file in one namespace, as Jupyter does, and has the value of each last line
# shown. A cell's file is named as Jupyter names it. Processes that it starts inherit its path of
# imports: an empty one would be another folder there.
RUNNER = """
import ast, json, linecache, os, sys

sys.path[0] = os.getcwd()
names = {"__name__": "__main__"}
for number, cell in enumerate(json.loads(open(sys.argv[1]).read())["cells"]):
    if cell["cell_type"] != "code":
        continue
    text, file = "".join(cell["source"]), f"/ipykernel_0/{number}.py"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    tree = ast.parse(text)
    last = [tree.body.pop()] if isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, file, "exec"), names)
    for expression in last:
        value = eval(compile(ast.Expression(expression.value), file, "eval"), names)
        if value is not None:
            getattr(value, "_repr_html_", value.__repr__)()
            print(f"shown {type(value).__name__}:\\n{value!r}")
"""


def notebook() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return content


def cells(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in notebook()["cells"] if cell["cell_type"] == kind]


def played(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUNNER, str(path)],
        cwd=NOTEBOOK.parent,  # where Jupyter runs it
        capture_output=True,
        text=True,
        timeout=limit(240),
    )


def test_the_format() -> None:
    """That of nbformat 4.5, as Jupyter writes it, without outputs."""
    content = notebook()
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    for cell in content["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | code
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert NOTEBOOK.read_text() == json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def test_files_that_the_text_names_exist() -> None:
    text = "\n".join(cells("markdown"))
    for name in re.findall(r"`([\w/]+\.(?:py|md))`", text):
        assert (NOTEBOOK.parent / name).exists() or (ROOT / name).exists(), name


def test_every_cell_runs() -> None:
    done = played(NOTEBOOK)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^shown (\w+)", done.stdout, re.M)
    assert shown.count("Drawing") == 3
    assert shown.count("Simulation") == 4
    assert shown[-2:] == ["Sweep", "list"]
    assert "rank 0's output at byte 0 lacks what rank 0 gives" in done.stdout
    assert re.search(r"\* +\d+ +rank 0  cell:5 ", done.stdout)  # the line with the mistake
    assert done.stdout.count("proved in") == 4
    # The text quotes these.
    for said in ("is 34.3", "688 µs of it by sharing links", "68.8 µs of it by"):
        assert said in done.stdout


def test_a_cell_that_fails_is_noticed(tmp_path: Path) -> None:
    broken = tmp_path / "broken.ipynb"
    cell = {"cell_type": "code", "source": ["ranks = 0\n", "1 / ranks"]}
    broken.write_text(json.dumps({"cells": [cell]}))
    done = played(broken)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
