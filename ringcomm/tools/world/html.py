"""The page of a world: its members over time, steps a second, and what changes cost."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from ringcomm._text import counted, show_seconds
from ringcomm.tools.page import COLORS, GREY, Page
from ringcomm.tools.world.state import CHANGES, State, cells, checkpoint, costs, headline, long

BLUE, VERMILION, GREEN, PINK, SKY, ORANGE = COLORS
# The colors of reasons: ringcomm/elastic/stats.py says what each means.
REASONS = {
    "ended": VERMILION,
    "hung": ORANGE,
    "silent": PINK,
    "timed out": SKY,
    "left": GREEN,
    "differs": GREY,
}
LONGEST = 12  # characters of a host's name beside the figure
ROW, FRAME = 20, 160  # pixels
NEVER_CAME = "did not enter"


def write_page(state: State, path: Path) -> None:
    """Write the page. Raises OSError, and ValueError where `ringcomm[tools]` is missing."""
    stats = state.stats
    began, ended = (time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in bounds(state))
    title = f"Elastic world {state.run}, {began} to {ended}"
    page = Page(title, f"{headline(state).partition(': ')[2]}. {costs(stats)}.")
    page.heading("Members")
    lives = lives_of(state)
    page.figure(
        members(state, lives),
        "When each process was a member, and why it went. A process that is started anew is "
        "another one.",
        FRAME + ROW * len(lives),
    )
    page.heading("Steps a second")
    page.figure(speed(state), "Between two looks at the world; dotted lines are changes.", 320)
    page.heading("Changes")
    if stats["history"]:
        page.figure(took(state), "From the failure, or the vote, until the next group worked.", 300)
        page.table(CHANGES, [cells(change) for change in stats["history"]])
    else:
        page.text("The world has not changed.")
    if stats["changes"] > len(stats["history"]):
        older = stats["changes"] - len(stats["history"])
        page.text(f"{counted(older, 'older change')} are only in the sums above.")
    page.heading("Checkpoints")
    page.text(f"At the last look: {checkpoint(stats, state.at)}.")
    page.write(path)


def bounds(state: State) -> tuple[float, float]:
    return min([state.began, *(change["at"] for change in state.stats["history"])]), state.at


def date(at: float) -> str:
    """Return a time as plotly reads it, in the zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"


class Life:
    """The time of one process as a member."""

    def __init__(self, who: Any, came: float, went: float) -> None:
        host = str(who["host"])
        short = host if len(host) <= LONGEST else host[: LONGEST - 1] + "…"
        self.name = f"{short} {who['pid']}"
        self.whole = f"{host} process {who['pid']}"
        self.came, self.went, self.why = came, went, ""


def lives_of(state: State) -> list[Life]:
    """Return the processes that were members, in the order in which they came."""
    began, now = bounds(state)
    lives: dict[str, Life] = {}
    for change in state.stats["history"]:
        for who in change["joined"]:
            lives[who["uuid"]] = Life(who, change["at"], now)
        for lost in change["lost"]:
            if lost["uuid"] not in lives and lost["why"] == NEVER_CAME:
                continue
            life = lives.setdefault(lost["uuid"], Life(lost, began, now))
            life.went, life.why = change["at"], lost["why"]
    for who in state.stats["members"]:
        lives.setdefault(who["uuid"], Life(who, began, now))
    return sorted(lives.values(), key=lambda life: life.came)


def members(state: State, lives: list[Life]) -> dict[str, Any]:
    """Return the figure of the members: a bar for each, and a mark where it went."""
    x: list[str | None] = []
    y: list[str | None] = []
    for life in lives:
        x += [date(life.came), date(life.went), None]
        y += [life.name, life.name, None]
    line = {"color": BLUE, "width": 8}
    bars = {"type": "scatter", "mode": "lines", "name": "member", "x": x, "y": y, "line": line}
    traces: list[dict[str, Any]] = [{**bars, "hoverinfo": "skip"}]
    for why in sorted({life.why for life in lives} - {""}):
        gone = [life for life in lives if life.why == why]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": why,
                "x": [date(life.went) for life in gone],
                "y": [life.name for life in gone],
                "text": [
                    f"{life.whole}: {why}, after {long(life.went - life.came)}" for life in gone
                ],
                "hoverinfo": "text",
                "marker": {"color": REASONS.get(why, GREY), "size": 12, "symbol": "x"},
            }
        )
    rows = {"type": "category", "autorange": "reversed", "showgrid": False}
    layout = {"yaxis": rows, "xaxis": axis(state), "showlegend": True}
    return {"data": traces, "layout": layout}


def axis(state: State) -> dict[str, Any]:
    began, now = bounds(state)
    room = (now - began) / 50  # for the marks at the ends
    return {"type": "date", "range": [date(began - room), date(now + room)], "nticks": 6}


def speed(state: State) -> dict[str, Any]:
    points = [*state.points, (state.at, state.stats["step"])]
    pairs = [(a, b) for a, b in pairwise(points) if b[0] - a[0] > 0.5]
    trace = {
        "type": "scatter",
        "mode": "lines",
        "line": {"color": BLUE, "shape": "vh"},
        "x": [date(b[0]) for _, b in pairs],
        "y": [round((b[1] - a[1]) / (b[0] - a[0]), 3) for a, b in pairs],
        "hovertemplate": "%{x}: %{y} steps/s<extra></extra>",
    }
    changes = [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "x0": date(change["at"]),
            "x1": date(change["at"]),
            "line": {"dash": "dot", "width": 1, "color": VERMILION if change["lost"] else GREEN},
        }
        for change in state.stats["history"]
    ]
    rate = {"title": {"text": "steps/s"}, "rangemode": "tozero"}
    layout = {"xaxis": axis(state), "yaxis": rate, "shapes": changes, "showlegend": False}
    return {"data": [trace], "layout": layout}


def took(state: State) -> dict[str, Any]:
    """Return the figure of how long each change took."""
    traces = []
    for name, color, lost in (("without a member", VERMILION, True), ("with others", GREEN, False)):
        some = [change for change in state.stats["history"] if bool(change["lost"]) == lost]
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "marker": {"color": color, "size": 8},
            "x": [date(change["at"]) for change in some],
            "y": [change["seconds"] for change in some],
            "text": [
                f"epoch {change['epoch']}: {show_seconds(change['seconds'])}" for change in some
            ],
            "hoverinfo": "text",
        }
        traces += [trace] if some else []
    seconds = {"title": {"text": "seconds"}, "rangemode": "tozero"}
    layout = {"xaxis": axis(state), "yaxis": seconds, "showlegend": True}
    return {"data": traces, "layout": layout}
