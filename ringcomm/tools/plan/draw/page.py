"""One HTML page: the frames behind a slider, and the messages over time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from ringcomm._network.costs import Network
from ringcomm._text import ranks_text, show_seconds
from ringcomm.algorithms.steps import GroupPlans
from ringcomm.tools import page
from ringcomm.tools.plan import lanes
from ringcomm.tools.plan.draw import frames, looks
from ringcomm.tools.plan.draw.frames import Frames
from ringcomm.tools.plan.draw.story import Story
from ringcomm.tools.plan.simulate import topology
from ringcomm.tools.plan.simulate.engine import simulate

FOLDER = Path(__file__).parent
MOST_LINES = 24  # messages beneath a frame


def timed(group: GroupPlans) -> str:
    """Return the messages over time as HTML, on a switch and with the default costs."""
    network = Network()
    where = topology.named("switch", group.call.hosts, network)
    run = simulate(group, where, network.fabrics)
    note = (
        f"{show_seconds(run.seconds)} by a model with the costs of {network.source}, not measured."
    )
    title = "The messages over time"
    drawn = lanes.draw(title, [], run, head=False)
    return f'<h2>{title}</h2>\n<p>{escape(note)}</p>\n<div class="scroll">{drawn}</div>'


def write(title: str, story: Story, timed: str) -> str:
    """Return the page."""
    drawn = Frames(story)
    count = len(story.rounds) + 1
    shown = min(1, count - 1)  # at the start nothing has happened
    texts = [list(messages(story, number)) for number in range(count)]
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{page.style()}",
        looks.style(story.call.ranks),
        f"{(FOLDER / 'draw.css').read_text(encoding='utf-8')}</style>",
        f"</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in frames.legend_lines(story)),
        f'<p class="keys">{"".join(map(picture_of, frames.keys_of(story)))}</p>',
        controls(count - 1, shown),
        '<div class="scroll" id="frames">',
    ]
    for number in range(count):
        hidden = "" if number == shown else " hidden"
        parts += [
            f'<div class="frame"{hidden}><svg class="story" width="{drawn.width + 4}" '
            f'height="{drawn.height}" role="img" aria-label="round {number}">',
            *drawn.frame(number),
            "</svg></div>",
        ]
    parts += [
        '</div>\n<ul id="messages"></ul>',
        timed,
        f"<script>const texts = {json.dumps(texts)};",
        (FOLDER / "draw.js").read_text(encoding="utf-8"),
        "</script>\n</main>\n</body>\n</html>",
    ]
    return "\n".join(parts) + "\n"


def picture_of(key: frames.Key) -> str:
    """Return a key as a picture of its own: narrow windows break lines between them."""
    drawn = "".join(frames.draw_key(key, 2, 14))
    return f'<svg class="story" width="{frames.key_width(key)}" height="20">{drawn}</svg>'


def controls(last: int, shown: int) -> str:
    return (
        '<div class="controls"><button id="back" aria-label="one round back">◀</button>'
        f'<input id="round" type="range" min="0" max="{last}" value="{shown}" aria-label="round">'
        '<button id="on" aria-label="one round on">▶</button>'
        '<button id="play">play</button><output id="where"></output></div>'
    )


def messages(story: Story, number: int) -> Iterator[str]:
    """Return the lines beneath a frame."""
    if number == 0:
        yield "No message has been sent."
        return
    some = [transfer for transfer in story.transfers if transfer.round == story.rounds[number - 1]]
    lines = []
    for transfer in sorted(some):
        for chunk in frames.covered(story, transfer):
            ranks = ranks_text(transfer.ranks)
            of = f"the sum of {ranks}" if len(transfer.ranks) > 1 else f"of {ranks}"
            more = f", {of}" if story.call.adds else ""
            lines.append(f"rank {transfer.sender} to rank {transfer.receiver}: chunk {chunk}{more}")
    lines = list(dict.fromkeys(lines))
    yield from lines[:MOST_LINES]
    if len(lines) > MOST_LINES:
        yield f"and {len(lines) - MOST_LINES} more"
