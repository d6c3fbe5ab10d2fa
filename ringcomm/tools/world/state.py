"""The file of an elastic world: reading it, and its texts."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ringcomm._flight import processes
from ringcomm._flight.processes import Life
from ringcomm._flight.records import temporary_folders
from ringcomm._text import aligned, counted, show_seconds

if TYPE_CHECKING:  # they come with torch
    from ringcomm.elastic.stats import PastChange, Stats

FORMAT = 1  # of the files: see ringcomm/elastic/status.py
FRESH_SECONDS = 10.0  # a file that another host has written since then is a running world's
LATE_SECONDS = 5.0  # without a new state: that is said
MOST_MEMBERS = 16  # rows on a screen
CHANGES = ["when", "epoch", "step", "ranks", "took", "went", "came"]


class State:
    """The state of a world, as one of its ranks has written it."""

    def __init__(self, path: Path) -> None:
        """Read a file. Raises OSError, and ValueError if it is none of these."""
        try:
            read = json.loads(path.read_bytes())
            if read["format"] != FORMAT:
                raise ValueError(f"its format is {read['format']}, and this reads {FORMAT}")
            self.run, self.world = str(read["run"]), str(read["world"])
            self.at, self.began = float(read["at"]), float(read["began"])
            self.points = [(float(at), int(step)) for at, step in read["points"]]
            self.stats: Stats = read["stats"]
            self.process = processes.read(read["pid"], json.dumps(read["process"]).encode())
            lines(self, self.at)  # all that is shown is there
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no file of an elastic world: {error!r}") from error

    def runs(self) -> bool:
        """Tell whether the training goes on, as far as this host can know."""
        life = processes.life_of(self.process)
        return life == Life.LIVES or (
            life == Life.UNKNOWN and time.time() - self.at < FRESH_SECONDS
        )


def worlds_in(place: Path) -> list[State]:
    """Return the newest state of each world in a folder, or that of a file; running ones last.

    Raises OSError and ValueError for a file; others in a folder are left out.
    """
    if place.is_file():
        return [State(place)]
    newest: dict[str, State] = {}
    for path in place.glob("world-*.json"):
        with contextlib.suppress(OSError, ValueError):
            state = State(path)
            if state.world not in newest or newest[state.world].at < state.at:
                newest[state.world] = state
    return sorted(newest.values(), key=lambda state: (state.runs(), state.at))


def place_of(named: Path | None) -> Path:
    """Return where to look: as it is named, else where ranks of this user write."""
    trace = os.environ.get("RINGCOMM_TRACE", "")
    return named or (Path(trace) if trace not in ("", "off") else temporary_folders())


# ---- texts


def headline(state: State) -> str:
    """Return what matters most, in one line."""
    stats = state.stats
    ranks, rate = counted(len(stats["members"]), "rank"), stats["steps_per_second"]
    now = f"{ranks}, epoch {stats['epoch']}, step {stats['step']}, {rate:.3g} steps/s"
    return f"elastic world {state.run}: {now}"


def costs(stats: Stats) -> str:
    """Return what the changes have cost, in one line."""
    return (
        f"{counted(stats['changes'], 'change')} took {stats['seconds_lost']:.3g} s; "
        f"{counted(stats['aborted'], 'step')} computed again, {stats['steps_lost']} lost; "
        f"{stats['lost']} left or died, {stats['joined']} joined"
    )


def checkpoint(stats: Stats, now: float) -> str:
    known, failures = stats["checkpoint"], stats["checkpoint_failures"]
    failed = f"; {failures} could not be written" if failures else ""
    if known is None:
        return f"no checkpoint is known of{failed}"
    age = long(now - known["at"])
    return f"checkpoint of step {known['step']}, {age} old, {known['path']}{failed}"


def long(seconds: float) -> str:
    """Return a time of people's: "40 s", "12 min", "7.5 h"."""
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def cells(change: PastChange) -> list[str]:
    """Return the row of a change."""
    went = [f"{lost['host']} {lost['pid']} ({lost['why']})" for lost in change["lost"]]
    came = [f"{joined['host']} {joined['pid']}" for joined in change["joined"]]
    return [
        clock(change["at"]),
        str(change["epoch"]),
        str(change["step"]),
        str(change["size"]),
        show_seconds(change["seconds"]),
        ", ".join(went) or "-",
        ", ".join(came) or "-",
    ]


def lines(state: State, now: float, height: int = 10**6) -> list[str]:
    """Return the lines of a screen: the newest changes first, as many as there is room for."""
    stats = state.stats
    late = now - state.at
    since = f", last seen {long(late)} ago" if late > LATE_SECONDS else ""
    head = [
        f"{headline(state)}, at {clock(now)}{since}",
        costs(stats),
        checkpoint(stats, now),
        "",
    ]
    rows = [["rank", "host", "process"]]
    rows += [[str(i), who["host"], str(who["pid"])] for i, who in enumerate(stats["members"])]
    rows += [["guest", who["host"], str(who["pid"])] for who in stats["guests"]]
    most = MOST_MEMBERS if height < 10**6 else len(rows)
    head += aligned(rows[: most + 1])
    if len(rows) > most + 1:
        head.append(f"and {len(rows) - most - 1} more")
    history = [cells(change) for change in reversed(stats["history"])]
    table = aligned([CHANGES, *history[: max(height - len(head) - 3, 1)]]) if history else []
    return [*head, "", *table]
