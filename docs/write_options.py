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

HEAD = """# Options

Every setting has one name. In code it is an attribute of `ringcomm.Options`; for launchers it is a
variable: `flows` is `RINGCOMM_FLOWS`. Code wins over the variable, and that over the default.

<!-- test: ranks 2 -->
```python
import torch.distributed as dist
import ringcomm

options = ringcomm.Options(algorithm="ring", spin_us=100)
options.cuda_memory = 64 << 20
dist.init_process_group("ringcomm", pg_options=options)
```

A value that cannot be is an error at once: ValueError, or TypeError for a wrong type or an unknown
keyword. `None` takes back what code has said. Options can be copied, and show what code has set.
"""
SECTIONS = {
    GROUP: """
## Of a group

Each group may have its own. Groups that `split_group` makes have those of their parent.
""",
    PROCESS: """
## Of a process

A process has one network and one log. Its first group sets them. Options of a later group that ask
for something else are an error; for `log`, `trace` and `metrics` a warning.
""",
    PROGRAM: """
## Variables alone

They are not in `Options`: programs that do not name ringcomm, or tools, read them.
""",
    BUILD: """
## For the build and the tests
""",
}
TAIL = """
`timeout`, a `timedelta`, is the first argument of `Options`, as of PyTorch's own; that of
`init_process_group` wins. `enable_reconfigure` is PyTorch's too.

CUDA reads one more variable itself: set `CUDA_DEVICE_MAX_CONNECTIONS` to 32 for many groups or
pipelines, [why](design.md#on-devices).

ringcomm warns of a variable that nobody reads, and says which one it may have meant. With
`RINGCOMM_STRICT=1` that is an error.
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
