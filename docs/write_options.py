"""Writes docs/options.md, and the settings in ringcomm/_C.pyi: `python docs/write_options.py`.

Both come from the table in ringcomm/options.py. With --check nothing is written; the exit status
says whether they are up to date.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from ringcomm.options import ATTRIBUTES, BUILD, GROUP, PROCESS, PROGRAM, SETTINGS, Setting

DOCS = Path(__file__).resolve().parent
PAGE, STUB = DOCS / "options.md", DOCS.parent / "ringcomm" / "_C.pyi"
BEGIN, END = "    # The settings, by docs/write_options.py.\n", "    # The settings end.\n"

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


def default_of(setting: Setting) -> str:
    value = "" if setting.default in (None, "") else f"`{setting.default}`"
    return setting.fits or value or "none"


def values_of(setting: Setting) -> str:
    if setting.kind is int:
        numbers = f"{setting.least:,} to {setting.most:,}".replace(",", "\N{NO-BREAK SPACE}")
        return ", ".join([numbers, *(f"`{choice}`" for choice in setting.choices)])
    return ", ".join(f"`{choice}`" for choice in setting.choices) or "text"


def table(scope: str) -> str:
    rows = [setting for setting in SETTINGS if setting.scope == scope]
    if scope in (GROUP, PROCESS):
        lines = ["| attribute | variable | default | values | meaning |", "|---|---|---|---|---|"]
        for one in rows:
            cells = [
                f"`{one.name}`",
                f"`{one.variable}`",
                default_of(one),
                values_of(one),
                one.text,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    elif scope == PROGRAM:
        lines = ["| variable | default | meaning |", "|---|---|---|"]
        lines += [f"| `{one.variable}` | {default_of(one)} | {one.text} |" for one in rows]
    else:
        lines = ["| variable | meaning |", "|---|---|"]
        lines += [f"| `{one.variable}` | {one.text} |" for one in rows]
    return "\n".join(lines) + "\n"


def page() -> str:
    sections = [f"{text}\n{table(scope)}" for scope, text in SECTIONS.items()]
    return HEAD + "".join(sections) + TAIL


def kinds(setting: Setting) -> str:
    return "int | str" if setting.kind is int and setting.choices else setting.kind.__name__


def type_of(setting: Setting) -> str:
    return f"{kinds(setting)} | None" if setting.default is None else kinds(setting)


def given_as(setting: Setting) -> str:
    return "str | Path | None" if setting.name == "secret" else f"{kinds(setting)} | None"


def docstring_of(setting: Setting) -> str:
    """What the page says of it, indented for the stub."""
    said = f"{setting.text}. Default: {default_of(setting)}."
    plain = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", said)
    values = values_of(setting)
    told = "" if values == "text" else f" Values: {values}."
    # One line says what it is; the rest follows, as in every docstring.
    whole = f"{plain[0].upper()}{plain[1:]}{told}".replace("\N{NO-BREAK SPACE}", ",")
    rest = textwrap.wrap(whole, 92, break_on_hyphens=False)
    lines = [f'"""The attribute of `{setting.variable}`.', "", *rest, '"""']
    return "".join(f"        {line}\n" if line else "\n" for line in lines)


def stub(text: str) -> str:
    """The stub with the settings of the table between its two comments."""
    lines = []
    for setting in ATTRIBUTES.values():
        name = setting.name
        lines.append(f"    @property\n    def {name}(self) -> {type_of(setting)}:\n")
        lines.append(docstring_of(setting))
        lines.append(f"    @{name}.setter\n")
        lines.append(f"    def {name}(self, value: {given_as(setting)}) -> None: ...\n")
    lines += ["    def __init__(\n", "        self,\n", "        timeout: timedelta = ...,\n"]
    lines.append("        *,\n")
    for setting in ATTRIBUTES.values():
        lines.append(f"        {setting.name}: {given_as(setting)} = None,\n")
    lines.append("    ) -> None: ...\n")
    head, rest = text.split(BEGIN)
    return head + BEGIN + "".join(lines) + END + rest.split(END)[1]


def main() -> int:
    """Writes both, or checks them."""
    wanted = {PAGE: page(), STUB: stub(STUB.read_text())}
    if "--check" in sys.argv[1:]:
        return 0 if all(p.exists() and p.read_text() == text for p, text in wanted.items()) else 1
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
