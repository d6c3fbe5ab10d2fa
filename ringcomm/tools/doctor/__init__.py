"""`ringcomm doctor`: finds what is wrong with hosts and network before a job starts.

Alone it looks at this host. Under a launcher (`torchrun ... -m ringcomm doctor`, srun, Ray) it
looks at every pair of ranks. Exit status: 0 fine, 1 works but something is bad, 2 cannot work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from ringcomm._text import output
from ringcomm.tools import progress
from ringcomm.tools.doctor.findings import judge, status_of
from ringcomm.tools.doctor.meeting import Place
from ringcomm.tools.doctor.report import as_json, page, text
from ringcomm.tools.doctor.stages import ROLL, STAGES, Examination, examine
from ringcomm.tools.page import needed

CANNOT_WORK = 2
STDOUT = Path("-")
EXAMPLES = (
    "ringcomm doctor                                         this host alone",
    "torchrun --nnodes=2 ... -m ringcomm doctor              every pair of ranks",
    "torchrun ... -m ringcomm doctor --html doctor.html      with heat maps",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=output, metavar="FILE", help="write all that was found; -: to stdout"
    )
    parser.add_argument("--html", type=output, metavar="FILE", help="write a page with heat maps")
    parser.add_argument(
        "--wait",
        type=float,
        default=ROLL,
        metavar="SECONDS",
        help="how long the other ranks are waited for; default: %(default)s",
    )


def run(options: argparse.Namespace) -> int:
    """Examine and report, in 30 s whatever is broken. Returns the exit status."""
    if options.html:
        needed()  # now, as the others wait later
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
