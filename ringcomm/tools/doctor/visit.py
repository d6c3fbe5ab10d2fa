"""A visit to the doctor: the examination, the report, and the exit status."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ringcomm.tools import progress
from ringcomm.tools.doctor.findings import judge, status_of
from ringcomm.tools.doctor.meeting import Place
from ringcomm.tools.doctor.report import as_json, page, text
from ringcomm.tools.doctor.stages import Examination, examine
from ringcomm.tools.doctor.timetable import STAGES

CANNOT_WORK = 2
STDOUT = Path("-")


def run(options: argparse.Namespace) -> int:
    """Examine and report, in 30 s whatever is broken. Returns the exit status."""
    try:
        place = Place.of(os.environ)
    except ValueError as error:
        print(f"ringcomm doctor: {error}", file=sys.stderr)
        return CANNOT_WORK
    # One rank tells how far they are: the terminal is everybody's.
    with progress.shown(STAGES, quiet=place is not None and place.rank != 0) as lines:
        examination = examine(place, os.environ, options.wait, lines)
    status = CANNOT_WORK
    try:
        status = tell(examination, options)
    finally:
        status = examination.part(status)
        sys.stdout.flush()
        sys.stderr.flush()
    if examination.stuck:
        os._exit(status)  # a thread hangs in the store's library, and would keep the process
    return status


def tell(examination: Examination, options: argparse.Namespace) -> int:
    """Report, on the rank that leads. Returns the exit status by what this rank knows."""
    evidence = examination.evidence
    findings = judge(evidence)
    status = status_of(findings)
    if examination.facts.rank != evidence.leader and not evidence.excluded and not evidence.broken:
        return status
    if options.json == STDOUT:
        print(json.dumps(as_json(evidence, findings), indent=1))
    else:
        print(text(evidence, findings))
    try:
        if options.json and options.json != STDOUT:
            options.json.write_text(json.dumps(as_json(evidence, findings), indent=1) + "\n")
        if options.html:
            page(evidence, findings, options.html)
    except OSError as error:
        print(f"ringcomm doctor: {error}", file=sys.stderr)
        return CANNOT_WORK
    return status
