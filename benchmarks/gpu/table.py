"""The rows that the stages of gpu_check.py yield, and the table made of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PASS, FAIL, INFO = "pass", "fail", "info"
HEAD = ("stage", "what", "figure", "unit", "target", "", "note")
COLUMNS = ("stage", "what", "figure", "unit", "target", "verdict", "note")  # of the page
NUMBERS = {2}  # columns to the right
STAGE_HEAD = ("ranks", "expected_s", "seconds", "status", "decides")


@dataclass(frozen=True)
class Row:
    """One line of the table. A figure may have a `target`; a plain check has none."""

    what: str
    figure: float | None = None
    unit: str = ""
    target: str = ""
    verdict: str = INFO
    note: str = ""
    stage: str = ""  # filled in where the stage runs

    def cells(self) -> tuple[str, ...]:
        figure = "" if self.figure is None else show(self.figure)
        return (
            self.stage, self.what, figure, self.unit, self.target, self.verdict, self.note,
        )  # fmt: skip

    def unjudged(self) -> Row:
        """Return it without a verdict on its figure: a simulated device has no speed."""
        return replace(self, verdict=INFO) if self.target else self


def info(what: str, figure: float | None = None, unit: str = "", note: str = "") -> Row:
    return Row(what, figure, unit, note=note)


def passed(what: str, figure: float | None = None, unit: str = "", note: str = "") -> Row:
    return Row(what, figure, unit, verdict=PASS, note=note)


def failed(what: str, note: str, figure: float | None = None, unit: str = "") -> Row:
    return Row(what, figure, unit, verdict=FAIL, note=note)


def at_least(bound: float, what: str, figure: float, unit: str, note: str = "") -> Row:
    return Row(what, figure, unit, f"≥ {show(bound)}", PASS if figure >= bound else FAIL, note)


def at_most(bound: float, what: str, figure: float, unit: str, note: str = "") -> Row:
    return Row(what, figure, unit, f"≤ {show(bound)}", PASS if figure <= bound else FAIL, note)


def aim(row: Row) -> Row:
    """Return it with its target, but without a verdict: no hardware may be able to meet it."""
    said = "target met" if row.verdict == PASS else "target not met"
    return replace(row, verdict=INFO, note=f"{said}; {row.note}" if row.note else said)


def show(figure: float) -> str:
    """Write a figure with three digits that mean something; whole numbers as they are."""
    if figure == int(figure) and abs(figure) < 1e9:
        return str(int(figure))
    size = abs(figure)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{figure:.{digits}f}"


def first_line(text: object, most: int = 160) -> str:
    """Return the first line of a text, shortened: what fits in a cell."""
    line = str(text).strip().partition("\n")[0].strip()
    return line if len(line) <= most else line[: most - 1] + "…"


def summary(rows: Iterable[Row]) -> str:
    verdicts = [row.verdict for row in rows]
    counts = {verdict: verdicts.count(verdict) for verdict in (PASS, FAIL, INFO)}
    return f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[INFO]} without a verdict"


def to_text(rows: Sequence[Row]) -> str:
    """Write columns that line up, with an empty line between stages."""
    table = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(HEAD))]
    lines = []
    before = ""
    for number, cells in enumerate(table):
        if number and before != cells[0]:
            lines.append("")
        before = cells[0]
        padded = [
            cell.rjust(width) if i in NUMBERS else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines) + "\n"


def to_page(
    rows: Sequence[Row], facts: dict[str, Any], stages: Sequence[dict[str, Any]], path: Path
) -> None:
    """Write a page: a row with its verdict each, how each stage ended, and the machine."""
    from ringcomm.tools.page import Page

    page = Page("gpu_check", summary(rows) + ".")
    failures = [row.cells() for row in rows if row.verdict == FAIL]
    if failures:
        page.heading("Failures")
        page.table(COLUMNS, failures)
    page.heading("Rows")
    page.table(COLUMNS, [row.cells() for row in rows])
    if stages:
        page.heading("Stages")
        names = ("stage", *STAGE_HEAD)
        page.table(names, [[stage[name] for name in names] for stage in stages])
    page.heading("The machine")
    page.table(["what", "value"], list(facts.items()))
    page.write(path)


def to_json(rows: Iterable[Row], facts: dict[str, Any], stages: Sequence[dict[str, Any]]) -> str:
    body = {
        "benchmark": "gpu_check",
        "machine": facts,
        "stages": stages,
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(body, indent=1, ensure_ascii=False) + "\n"


def append(path: Path, row: Row) -> None:
    """Add a row to a file at once, so that it outlives whatever becomes of its stage."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")


def load(path: Path) -> list[Row]:
    """Return the rows of such a file; its last line may have been cut short."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(Row(**json.loads(line)))
            except json.JSONDecodeError:
                break
    return rows
