"""`ringcomm plan search`: find a plan for a network whose links differ."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ringcomm._network import costs
from ringcomm._network.costs import Network
from ringcomm._text import list_of, output, positive, show_seconds, show_size, size
from ringcomm.algorithms.proof import Proof, verify
from ringcomm.tools import arguments
from ringcomm.tools.plan.search import tries, writing
from ringcomm.tools.plan.search.tries import WAYS, Found, Other, Task
from ringcomm.tools.plan.simulate import files, topology
from ringcomm.tools.plan.simulate.bounds import Bounds, bounds
from ringcomm.tools.plan.simulate.command import SHOWN_LINKS, link_lines

CHUNKS, TRIES, SEED = [1, 2, 4], 16, 0
HEAD = """{what} on {topology}, found by search.

    {command}

By simulation {bytes} bytes take {found}, by the library's ring {ring}, and at least {least} by any
plan. Register it for this group, on this network: docs/search.md.
"""
EXAMPLES = ("ringcomm plan search all_gather --topology hosts:2x4 --output found.py",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    collective = arguments.add_collective(parser, list(WAYS), optional=True)
    arguments.former(parser, collective, "--collective")
    text = "as of `ringcomm plan simulate`; or its file"
    add("--topology", required=True, metavar="NAME", help=text)
    add("--ranks", type=positive, metavar="N", help="one on each host (the topology's hosts)")
    text = "the whole message: all shards together (1M)"
    size_option = add("--size", type=size, default="1M", metavar="SIZE", help=text)
    arguments.former(parser, size_option, "--bytes")
    add("--root", type=int, default=0, help="of broadcast (0)")
    add("--chunks", type=list_of(positive), default=CHUNKS, metavar="LIST",
        help="into how many to cut each rank's part; the best of these (1,2,4)")  # fmt: skip
    add("--tries", type=positive, default=TRIES, help=f"with each number of chunks ({TRIES})")
    add("--seed", type=int, default=SEED, help=f"of what chance decides ({SEED})")
    arguments.add_costs(parser)
    add("--links", type=int, default=SHOWN_LINKS, help=f"show so many; 0: all ({SHOWN_LINKS})")
    add("--output", type=output, metavar="FILE.py", help="write the algorithm, if it is proved")


def run(options: argparse.Namespace) -> int:
    if options.collective is None:
        raise ValueError(f"write the collective: one of {', '.join(WAYS)}")
    if options.root and options.collective != "broadcast":
        raise ValueError(f"{options.collective} takes no --root: it is for broadcast")
    if options.links < 0:
        raise ValueError(f"--links {options.links}: write how many, or 0 for all")
    if options.output and options.output.suffix != ".py":
        raise ValueError(f"--output {options.output}: it is Python: use a name that ends in .py")
    network = costs.read(options.costs)
    where = files.find(options.topology, hosts_of(options, network), network)
    task = Task(options.collective, options.size, options.root, where, network)
    tries.check(task, max(options.chunks))
    others = tries.library(task)
    result = tries.search(task, options.chunks, options.tries, options.seed)
    least = bounds(task.call, where, network.fabrics)
    text = writing.text_of(result.form, result.steps, head(options, task, result, others, least))
    proof = verify(
        writing.load(text, result.form), task.ranks, task.bytes, task.collective, root=task.root
    )
    for line in (
        *report(task, result, others, least, proof),
        *link_lines(result.engine, options.links),
    ):
        print(line)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
        print(f"\n{options.output}: written; its function is {task.collective}")
    return 0


def hosts_of(options: argparse.Namespace, network: Network) -> int:
    """Return --ranks, or as many as the topology has hosts. Raises ValueError."""
    name: str = options.topology
    if options.ranks:
        return int(options.ranks)
    if name.endswith(".json"):
        return len(files.read(Path(name), network.fabrics.network.alpha).hosts)
    if name == "measured" and network.hosts:
        return len(network.hosts.names)
    if topology.local_of(name):
        raise ValueError(f"{name}: a search is for one rank on each host: try switch, and --ranks")
    count = topology.hosts_of(name)
    if count is None:
        raise ValueError(f"{name} fits any number of hosts: write --ranks")
    return count


def ring_of(others: Sequence[Other]) -> Other:
    """Return the ring, which every collective here has."""
    return next(other for other in others if other.name == "ring")


def head(
    options: argparse.Namespace,
    task: Task,
    result: Found,
    others: Sequence[Other],
    least: Bounds,
) -> str:
    what = writing.described(result.form)
    return HEAD.format(
        what=what[0].upper() + what[1:],
        topology=task.topology.name,
        command=command_of(options),
        bytes=show_size(task.bytes),
        found=show_seconds(result.engine.seconds),
        ring=show_seconds(ring_of(others).seconds),
        least=show_seconds(sure(least)),
    )


def command_of(options: argparse.Namespace) -> str:
    """Return the command that finds this again, over several lines if need be."""
    place = shlex.quote(options.topology)
    words = [f"ringcomm plan search {options.collective} --topology {place}"]
    for name in ("ranks", "size", "root", "chunks", "tries", "seed", "costs"):
        value = getattr(options, name)
        if value is None or (name == "root" and value == 0):
            continue
        shown = ",".join(map(str, value)) if name == "chunks" else str(value)
        shown = show_size(value) if name == "size" else shown
        word = f"--{name} {shlex.quote(shown)}"
        if len(words[-1]) + len(word) > 85:
            words.append("  ")
        words[-1] += f" {word}"
    return "\n    ".join(words)


def report(
    task: Task, result: Found, others: Sequence[Other], least: Bounds, proof: Proof
) -> Iterator[str]:
    """Tell the time beside the ring, the library's fastest and the bound; then what was proved."""
    form, ring, best = result.form, ring_of(others), others[0]
    chunks = "1 chunk" if form.parts == 1 else f"{form.parts} chunks"
    what = f"{task.collective} of {show_size(task.bytes)} bytes, {task.ranks} ranks"
    yield f"{what}: {chunks} of each rank's part"
    yield f"{task.topology.name}, by a model; try {result.number}"
    yield f"\nfound        {show_seconds(result.seconds)}"
    yield f"ring         {show_seconds(ring.seconds)}, {compared(ring.seconds, result.seconds)}"
    if best.name != "ring":
        much = compared(best.seconds, result.seconds)
        yield f"{best.name:11}  {show_seconds(best.seconds)}, {much}; the library's fastest"
    bound = sure(least)
    cut = f": what must go {least.cut}" if bound == least.bandwidth else ""
    share = f"; found takes {result.seconds / bound:.2f} times that" if bound else ""
    yield f"lower bound  {show_seconds(bound)}{cut}{share}"
    sent, messages = max(proof.sent), max(proof.messages)
    yield f"\nproved: a rank sends {sent:,} bytes at most, in {messages} messages"


def sure(least: Bounds) -> float:
    """Return the seconds that every plan takes: that of latency is not for all of them."""
    return max(least.bandwidth, least.addition)


def compared(other: float, best: float) -> str:
    """Return "1.32 times as long", or "found is no faster"."""
    return f"{other / best:.2f} times as long" if other > best else "found is no faster"
