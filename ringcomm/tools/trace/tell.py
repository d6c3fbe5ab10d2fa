"""Findings for a terminal: a table of rich's there, plain lines elsewhere."""

from __future__ import annotations

import sys

from ringcomm._text import aligned
from ringcomm.tools import extra
from ringcomm.tools.trace.findings import Finding, nothing_wrong, summary
from ringcomm.tools.trace.job import Job

OTHERS = 7  # findings after the first


def tell(job: Job, findings: list[Finding], remarks: list[str]) -> None:
    """Print what is wrong, its table, the other findings, and what to know of the records."""
    print(findings[0].sentence if findings else nothing_wrong(job))
    if findings and findings[0].rows:
        print_table(findings[0])
    for finding in findings[1 : 1 + OTHERS]:
        print(f"{'so ' if finding.follows else 'also '}{finding.sentence}")
    if len(findings) > 1 + OTHERS:
        print(f"and {len(findings) - 1 - OTHERS} more findings, which --html shows")
    for text in [summary(job), *remarks]:
        print(f"note: {text}")


def print_table(finding: Finding) -> None:
    if sys.stdout.isatty():
        try:
            table = extra("rich.table").Table(box=extra("rich.box").SIMPLE_HEAD)
            text = extra("rich.text").Text
            for name in finding.columns:
                table.add_column(name, overflow="fold")
            for row in finding.rows:
                table.add_row(*(text(cell) for cell in row))
            extra("rich.console").Console().print(table)
            return
        except ValueError:
            pass  # rich is not there: plain lines say the same
    for line in aligned([finding.columns, *finding.rows]):
        print(f"  {line}")
