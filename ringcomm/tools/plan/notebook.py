"""`draw`, `simulate` and `sweep`: the pictures of the commands, in a notebook.

Each returns an object that a notebook shows, and whose text is what the command prints. An
algorithm is a function, as `ringcomm.algorithms` wants it; a name of the library; or None, for
the library's own choice.
Sizes are bytes of the whole message, all shards together. docs/by_hand.md tells more.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from ringcomm._network.costs import Network
from ringcomm.algorithms import Algorithm
from ringcomm.algorithms.call import Call, call_of
from ringcomm.tools.plan import source
from ringcomm.tools.plan.draw import frames, page
from ringcomm.tools.plan.draw.command import PER_RANK
from ringcomm.tools.plan.draw.story import Story, story_of
from ringcomm.tools.plan.simulate import files, sweep_drawing
from ringcomm.tools.plan.simulate import sweep as sweeps
from ringcomm.tools.plan.simulate.command import Found

__all__ = ["Drawing", "Simulation", "Sweep", "draw", "simulate", "sweep"]
AROUND = 380  # pixels of a page above the state of the ranks, and some beneath
LINE = 22  # columns of the messages beneath it
COLUMNS = 3
FOUR_TIMES = tuple(1024 * 4**power for power in range(6))


@dataclass(frozen=True, repr=False)
class Drawing:
    """The parts of each rank after each round: a page with a slider, and a picture of all rounds.

    `html` is the page and `svg` the picture, each a whole file.
    """

    title: str
    html: str = field(repr=False)
    svg: str = field(repr=False)
    rounds: int
    _height: int

    def _repr_html_(self) -> str:
        """Return the page in a frame, so that its style and script are its own."""
        return (
            f'<iframe srcdoc="{escape(self.html)}" title="{escape(self.title)}" '
            f'style="width: 100%; height: {self._height}px; border: 0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"{self.title}, {self.rounds} round{'s' * (self.rounds != 1)}"


@dataclass(frozen=True, repr=False)
class Simulation:
    """The time of an operation by the model, in seconds, and the least that any plan would take.

    Its text has what the last rank has waited for, and the links; `svg` the messages over time.
    """

    algorithm: str
    seconds: float
    bound: float
    text: str
    svg: str = field(repr=False)

    def _repr_html_(self) -> str:
        return f"{table(self.text)}\n{image(self.svg, self.algorithm)}"

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False)
class Sweep:
    """Times of several algorithms: `times[name][bytes]` in seconds, as a picture and a table.

    `bounds[bytes]` is the least that any plan would take.
    """

    times: dict[str, dict[int, float]]
    bounds: dict[int, float]
    text: str
    svg: str = field(repr=False)

    def fastest(self, bytes: int) -> str:
        """Return the name of the fastest algorithm for a size that was swept."""
        return sweeps.fastest(self.times, bytes)

    def _repr_html_(self) -> str:
        return f"{image(self.svg, 'time against bytes')}\n{table(self.text)}"

    def __repr__(self) -> str:
        return self.text


def table(text: str) -> str:
    """Return the lines in letters of one width, which notebooks give to code alone."""
    return f'<pre style="font-family: monospace; line-height: 1.3">{escape(text)}</pre>'


def image(svg: str, text: str) -> str:
    """Return the picture as an image, so that its style is its own."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(text)}" src="data:image/svg+xml;base64,{data}">'


def draw(
    algorithm: Algorithm | str | None = None,
    ranks: int = 4,
    bytes: int | None = None,
    collective: str = "all_reduce",
    *,
    root: int = 0,
    local: int = 1,
) -> Drawing:
    """Draw which chunks each rank has after each round, as `ringcomm plan draw` does.

    `bytes` is 1 KiB for each rank, unless told otherwise, and `local` the ranks of each host. It
    proves nothing: a wrong algorithm is drawn as far as it comes. Raises AlgorithmError, and
    ValueError where ranks wait for ever, or a picture has no room for them.
    """
    size = ranks * PER_RANK if bytes is None else bytes
    call = checked(collective, ranks, size, root, local)
    frames.check_ranks(ranks)
    group = source.plans_of(call, algorithm)
    story = story_of(group)
    frames.check_chunks(len(story.chunks))
    title = source.title_of(call, group.algorithm)
    html = page.write(title, story, "")
    return Drawing(title, html, frames.draw(title, story), len(story.rounds), height_of(story))


def height_of(story: Story) -> int:
    """Return the height of the page in pixels, with the round that has the most messages."""
    counts = [len(list(page.messages(story, n))) for n in range(len(story.rounds) + 1)]
    return AROUND + frames.Frames(story).height + LINE * -(-max(counts) // COLUMNS)


def simulate(
    algorithm: Algorithm | str | None = None,
    ranks: int = 8,
    bytes: int = 1 << 20,
    collective: str = "all_reduce",
    *,
    root: int = 0,
    local: int = 1,
    topology: str = "switch",
) -> Simulation:
    """Return the time on links that messages share, as `ringcomm plan simulate` does.

    `topology` is a name, such as "torus:2x4", or the path of a JSON file: docs/simulate.md has
    them. `local` is the ranks of each host. It proves nothing. Raises AlgorithmError, and
    ValueError where the topology does not fit, or ranks wait for ever.
    """
    call = checked(collective, ranks, bytes, root, local)
    network = Network()
    where = files.find(topology, call.hosts, network)
    report = Found.of(source.plans_of(call, algorithm), where, network)
    text, seconds = "\n".join(report.lines()), report.engine.seconds
    return Simulation(report.group.algorithm, seconds, report.least.seconds, text, report.svg())


def sweep(
    algorithms: Sequence[Algorithm | str],
    ranks: int = 8,
    bytes: Sequence[int] = FOUR_TIMES,
    collective: str = "all_reduce",
    *,
    root: int = 0,
    local: int = 1,
    topology: str = "switch",
) -> Sweep:
    """Simulate several algorithms with several sizes, and compare their times.

    Sizes are rounded to equal shards. An algorithm that refuses such a call with a ValueError is
    left out there. Raises as `simulate` does, and ValueError where two have one name.
    """
    for size in bytes:
        checked(collective, ranks, sweeps.rounded(size, ranks) if size > 0 else size, root, local)
    network = Network()
    task = sweeps.Task(collective, bytes, sweeps.named(algorithms), root)
    panel = sweeps.panel_of(task, ranks, ranks // local, topology, network)
    text = "\n".join([f"{collective} on {topology}", *sweeps.lines_of(panel)])
    svg = sweep_drawing.picture_of(collective, topology, network, [panel])
    return Sweep(panel.times, panel.bounds, text, svg)


def checked(collective: str, ranks: int, size: int, root: int, local: int) -> Call:
    """Return the call. Raises ValueError where nothing is to be shown."""
    if size < 1:
        raise ValueError(f"a message of {size} bytes: write 1 or more")
    if local < 1 or ranks % local:
        raise ValueError(f"{ranks} ranks do not fill hosts of {local}")
    return call_of(collective, ranks, size, ranks // local, root=root)
