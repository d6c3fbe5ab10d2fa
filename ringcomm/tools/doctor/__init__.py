"""`ringcomm doctor`: finds what is wrong with hosts and network before a job starts.

Alone it looks at this host. Under a launcher (`torchrun ... -m ringcomm doctor`, srun, Ray) it
looks at every pair of ranks. Exit status: 0 fine, 1 works but something is bad, 2 cannot work.
"""

from __future__ import annotations

import argparse

from ringcomm._text import output
from ringcomm.tools.doctor.timetable import ROLL
from ringcomm.tools.page import needed

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
    if options.html:
        needed()  # now, as the others wait later
    from ringcomm.tools.doctor import visit  # with torch, without which --help does

    return visit.run(options)
