"""The arguments of `ringcomm draw`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ringcomm._text import positive, size
from ringcomm.tools.plan import source
from ringcomm.tools.plan.draw import frames, page
from ringcomm.tools.plan.draw.story import story_of

PER_RANK = 1024  # bytes of a shard, unless told otherwise: every algorithm sends it in one piece


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source.add_source(parser)
    add = parser.add_argument
    add("--ranks", type=positive, metavar="N", help="of the group (4)")
    add("--hosts", type=positive, metavar="N", help="the ranks are spread over them (each its own)")
    add("--bytes", type=size, metavar="SIZE", help="the whole message (1K for each rank)")
    add("--algorithm", metavar="NAME", help="another than the table's; or FILE.py:FUNCTION")
    add("--root", type=int, default=0, help="of broadcast, reduce, scatter and gather (0)")
    add("--svg", type=Path, metavar="FILE", help="draw the state after each round, side by side")
    add("--html", type=Path, metavar="FILE", help="one page with a slider, which needs no network")


def run(options: argparse.Namespace) -> int:
    if not (options.svg or options.html):
        raise ValueError("say what to write: --svg FILE, --html FILE, or both")
    if source.file_of(options.collective):
        given = [n for n in ("ranks", "hosts", "bytes", "algorithm") if getattr(options, n)]
        if given:
            raise ValueError(f"{options.collective} has its own shape: leave out --{given[0]}")
    ranks = options.ranks or 4
    group = source.plans_of(
        options.collective,
        ranks,
        options.bytes or ranks * PER_RANK,
        options.hosts or ranks,
        options.algorithm,
        options.root,
    )
    frames.check_ranks(group.shape.size)
    story = story_of(group)
    frames.check_chunks(len(story.chunks))
    title = source.title_of(group)
    count = len(story.rounds)
    print(f"{title}\n{count} round{'s' * (count != 1)}, {len(story.chunks)} chunks")
    for number in range(1, count + 1):
        print(f"  round {number}: {frames.sentence(story, number)}")
    if options.svg:
        options.svg.write_text(frames.draw(title, story), encoding="utf-8")
        print(f"{options.svg}: drawn")
    if options.html:
        text = page.write(title, story, page.timed(group))
        options.html.write_text(text, encoding="utf-8")
        print(f"{options.html}: written")
    return 0
