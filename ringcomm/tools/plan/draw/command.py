"""`ringcomm plan draw`: who has what after each message of a plan, as a picture and as a page."""

from __future__ import annotations

import argparse

from ringcomm._text import size
from ringcomm.algorithms.call import call_of
from ringcomm.tools import arguments
from ringcomm.tools.plan import source
from ringcomm.tools.plan.draw import frames, page
from ringcomm.tools.plan.draw.story import story_of

PER_RANK = 1024  # bytes of a shard, unless told otherwise: every algorithm sends it in one piece
EXAMPLES = (
    "ringcomm plan draw all_reduce --algorithm ring",
    "ringcomm plan draw all_reduce --algorithm ring --html ring.html",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_collective(parser)
    arguments.add_ranks(parser, 4, "of the group")
    arguments.add_hosts(parser, None, "the ranks are spread over them evenly (each its own)")
    text = "the whole message (1K for each rank)"
    size_option = parser.add_argument("--size", type=size, metavar="SIZE", help=text)
    arguments.former(parser, size_option, "--bytes")
    source.add_plan(parser)
    arguments.add_files(
        parser,
        svg="draw the state after each round, side by side",
        html="one page with a slider, which needs no network",
    )


def run(options: argparse.Namespace) -> int:
    ranks = options.ranks
    root = source.check_root(options, options.collective)
    whole, hosts = options.size or ranks * PER_RANK, options.hosts or ranks
    call = call_of(options.collective, ranks, whole, hosts, root=root)
    frames.check_ranks(ranks)
    group = source.plans_of(call, options.algorithm)
    story = story_of(group)
    frames.check_chunks(len(story.chunks))
    title = source.title_of(call, group.algorithm)
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
