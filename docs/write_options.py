"""Writes docs/options.md from the table in ringcomm/options.py: `python docs/write_options.py`.

With --check nothing is written; the exit status says whether the page is up to date.
"""

from __future__ import annotations

import ast
import inspect
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from ringcomm.options import (
    BUILD,
    GROUP,
    PROCESS,
    PROGRAM,
    SETTINGS,
    Attributes,
    Setting,
    Variables,
)

PAGE = Path(__file__).resolve().parent / "options.md"

HEAD = """# Options and environment variables

You rarely need any of these. Every setting has a single name: in code it is an attribute of
`ringcomm.Options`, and in the environment of your ranks a variable, so `flows` is `RINGCOMM_FLOWS`.
Code wins over the variable, and the variable over the default.

<!-- test: ranks 2 -->
```python
import torch.distributed as dist
import ringcomm

options = ringcomm.Options(algorithm="ring", spin_us=100)
options.cuda_memory = 64 << 20
dist.init_process_group("ringcomm", pg_options=options)
```

An invalid value raises immediately: ValueError, or TypeError for a wrong type or an unknown
keyword. Set an attribute to `None` to go back to the variable or the default. You can copy options,
and print them to see what you have set. A misspelled variable gets a warning that suggests the
right name, or an error with `RINGCOMM_STRICT=1`.
"""
SECTIONS = {
    GROUP: """
## Settings of a group

Each group may have its own. Groups made by `split_group` inherit those of their parent.
""",
    PROCESS: """
## Settings of a process

A process has one network and one log, so its first group sets these. If the options of a later
group ask for something else, that is an error (for `log`, `trace` and `metrics`, a warning).
torchrun passes its own environment on to the ranks it starts.
""",
    PROGRAM: """
## Environment variables only

These aren't in `Options`, because tools or programs that don't know ringcomm read them.
""",
    BUILD: """
## For the build and the tests
""",
}
TAIL = """
`Options` also takes `timeout`, a `timedelta`, as its first argument, and `enable_reconfigure`, as
PyTorch's own options do; the timeout of `init_process_group` wins. If you have many groups or
pipelines on a GPU, also set CUDA's own `CUDA_DEVICE_MAX_CONNECTIONS=32`.
"""


def default_of(setting: Setting[Any]) -> str:
    value = "" if setting.default in (None, "") else f"`{setting.default}`"
    return setting.fits or value or "none"


def values_of(setting: Setting[Any]) -> str:
    if setting.kind is int:
        numbers = f"{setting.least:,} to {setting.most:,}".replace(",", "\N{NO-BREAK SPACE}")
        return ", ".join([numbers, *(f"`{choice}`" for choice in setting.choices)])
    return ", ".join(f"`{choice}`" for choice in setting.choices) or "text"


def table(scope: str) -> str:
    if scope in (GROUP, PROCESS):
        lines = ["| attribute | variable | default | values | meaning |", "|---|---|---|---|---|"]
    elif scope == PROGRAM:
        lines = ["| variable | default | meaning |", "|---|---|---|"]
    else:
        lines = ["| variable | meaning |", "|---|---|"]
    meanings = texts()
    for setting in SETTINGS:
        cells = [f"`{setting.variable}`", meanings[setting.name]]
        if scope != BUILD:
            cells.insert(1, default_of(setting))
        if scope in (GROUP, PROCESS):
            cells = [f"`{setting.name}`", *cells[:2], values_of(setting), cells[2]]
        if setting.scope == scope:
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    sections = [f"{text}\n{table(scope)}" for scope, text in SECTIONS.items()]
    return HEAD + "".join(sections) + TAIL


def texts() -> dict[str, str]:
    """Return the docstring below each row of the table, as one line."""
    rows = {}
    for kind in (Attributes, Variables):
        (body,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(body, ast.ClassDef)
        for row, text in pairwise(body.body):
            target = (
                row.target if isinstance(row, ast.AnnAssign) else getattr(row, "targets", [0])[0]
            )
            if isinstance(target, ast.Name) and isinstance(text, ast.Expr):
                rows[target.id.rstrip("_")] = " ".join(str(ast.literal_eval(text.value)).split())
    return rows


def main() -> int:
    wanted = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == wanted else 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
