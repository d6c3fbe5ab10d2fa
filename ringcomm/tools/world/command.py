"""`ringcomm elastic top`: the members of a running elastic world, who went and why, and the pace.

It reads the file that the world writes on each of its hosts, once a second: in RINGCOMM_TRACE, or
among temporary files where that is not set. When the training has ended, its last state is there.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ringcomm._text import output
from ringcomm.tools import extra
from ringcomm.tools.top import keys
from ringcomm.tools.world.state import lines, place_of, worlds_in

EXAMPLES = (
    "ringcomm elastic top                            the world that runs on this machine",
    "ringcomm elastic top records --html world.html  a page of the whole training",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "place",
        type=Path,
        nargs="?",
        help="a world's file, or the folder of them: else RINGCOMM_TRACE, or temporary files",
    )
    add("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks")
    add("--once", action="store_true", help="print what is known now, and end")
    add("--html", type=output, metavar="FILE", help="write a page of the training so far, and end")


def run(options: argparse.Namespace) -> int:
    """Show the newest world until `q` or Ctrl-C. Raises ValueError where there is none."""
    place = place_of(options.place)
    live = not (options.once or options.html) and sys.stdout.isatty()
    if not live:
        some = worlds_in(place)
        if not some:
            raise ValueError(
                f"{place} has no file of an elastic world: a training writes one where "
                "RINGCOMM_TRACE says, unless that is off"
            )
        if options.html:
            from ringcomm.tools.world.html import write_page

            write_page(some[-1], options.html)
            print(f"{options.html} is for a browser")
        else:
            print("\n".join(lines(some[-1], time.time())).rstrip())
        return 0
    return watch(place, options.every)


def watch(place: Path, every: float) -> int:
    text = extra("rich.text").Text
    with (
        contextlib.suppress(KeyboardInterrupt),
        keys() as pressed,
        extra("rich.live").Live(screen=True, auto_refresh=False) as screen,
    ):
        typed = ""
        while "q" not in typed.lower():
            some = [state for state in worlds_in(place) if state.runs()]
            height = shutil.get_terminal_size().lines
            shown: list[Any] = [f"{place}: no elastic world runs yet (q quits)"]
            if some:
                shown = lines(some[-1], time.time(), height)
            whole = text("\n".join(shown), no_wrap=True, overflow="ellipsis")
            screen.update(whole, refresh=True)
            typed = pressed(every)
    return 0
