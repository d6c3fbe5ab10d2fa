"""`ringcomm plan simulate`: how long a plan takes on links that its messages share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ringcomm._network import costs
from ringcomm._network.costs import Network
from ringcomm._text import list_of, ranks, show_rate, show_seconds, show_size
from ringcomm.algorithms.call import call_of
from ringcomm.algorithms.steps import GroupPlans
from ringcomm.options import ALGORITHMS
from ringcomm.tools import arguments
from ringcomm.tools.plan import lanes, source
from ringcomm.tools.plan.simulate import files, sweep, sweep_drawing, topology
from ringcomm.tools.plan.simulate.bounds import Bounds, bounds
from ringcomm.tools.plan.simulate.engine import Engine, simulate
from ringcomm.tools.plan.simulate.path import Part, critical_path, hops, message_count, totals
from ringcomm.tools.plan.simulate.topology import Topology

SHOWN_LINKS = 8
EXAMPLES = (
    "ringcomm plan simulate all_reduce --ranks 2..64 --size 1K,1M",
    "ringcomm plan simulate all_reduce --topology fat-tree:4:4 --ranks 16 --svg times.svg",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_collective(parser, several=True)
    add("--ranks", type=ranks, metavar="LIST", help="8; or 2,4,8 or 2..16 for a sweep (4)")
    text = "the ranks are spread over them evenly: one number, or as many as --ranks (each its own)"
    add("--hosts", type=ranks, metavar="LIST", help=text)
    arguments.former_local(parser)
    size = arguments.add_size(parser, "1M", "the whole message: all shards together")
    arguments.former(parser, size, "--bytes")
    text = "names, or FILE.py:FUNCTION (the table's; of a sweep: all)"
    add("--algorithm", type=list_of(str), metavar="LIST", help=text)
    add("--root", type=int, help="of broadcast, reduce, scatter and gather (0)")
    names = ", ".join(topology.NAMES)
    add("--topology", default="switch", metavar="NAME", help=f"{names}; or a JSON file (switch)")
    arguments.add_costs(parser)
    add("--links", type=int, default=SHOWN_LINKS, help=f"show so many; 0: all ({SHOWN_LINKS})")
    arguments.add_files(parser, svg="draw the messages, or the sweep")


def run(options: argparse.Namespace) -> int:
    network = costs.read(options.costs)
    if options.links < 0:
        raise ValueError(f"--links {options.links}: write how many, or 0 for all")
    if len(options.collectives) > 1 and options.svg:
        raise ValueError("--svg takes one collective")
    groups = groups_of(options)
    several = max(map(len, (groups, options.sizes, options.algorithm or []))) > 1
    for number, name in enumerate(options.collectives):
        if number:
            print()
        if several:
            picture = sweep_of(options, name, groups, network)
        else:
            picture = report(options, name, groups[0], network)
        if options.svg:
            options.svg.write_text(picture(), encoding="utf-8")
            print(f"\n{options.svg}: drawn")
    return 0


Group = tuple[int, int]  # ranks, and hosts


def groups_of(options: argparse.Namespace) -> list[Group]:
    """Return the groups that are asked for. Raises ValueError."""
    both, fixed = topology.local_of(options.topology), topology.hosts_of(options.topology)
    if both and options.local not in (None, both[1]):
        raise ValueError(f"--local {options.local}: {options.topology} has {both[1]} on each host")
    local = both[1] if both else 1 if options.local is None else options.local
    if local < 1:
        raise ValueError(f"--local {local}: a host has at least one rank")
    if options.hosts is None:
        numbers = options.ranks or [(fixed or 4) * local]
        for number in numbers:
            if number % local:
                raise ValueError(f"--ranks {number}: they do not fill hosts of {local}")
        return [(number, number // local) for number in numbers]
    numbers = options.ranks or [hosts * local for hosts in options.hosts]
    hosts = options.hosts * (len(numbers) if len(options.hosts) == 1 else 1)
    if len(hosts) != len(numbers):
        raise ValueError("--hosts: write one number, or as many as for --ranks")
    return list(zip(numbers, hosts, strict=True))


def sweep_of(
    options: argparse.Namespace, collective: str, groups: Sequence[Group], network: Network
) -> Callable[[], str]:
    """Print a table for each group, and return what draws them all."""
    root = source.check_root(options, collective)
    algorithms = sweep.named(options.algorithm or ALGORITHMS)
    task = sweep.Task(collective, options.sizes, algorithms, root)
    print(f"{collective}\n{options.topology}, by a model with the costs of: {network.source}")
    panels = []
    for group in groups:
        panels.append(sweep.panel_of(task, *group, options.topology, network))
        for line in sweep.lines_of(panels[-1]):
            print(line)
    return lambda: sweep_drawing.picture_of(collective, options.topology, network, panels)


def report(
    options: argparse.Namespace, collective: str, group: Group, network: Network
) -> Callable[[], str]:
    """Print what happens in one operation, and return what draws it."""
    ranks, hosts = group
    root = source.check_root(options, collective)
    call = call_of(collective, ranks, options.sizes[0], hosts, root=root)
    algorithm = options.algorithm[0] if options.algorithm else None
    where = files.find(options.topology, hosts, network)
    result = Found.of(source.plans_of(call, algorithm, network), where, network)
    for line in result.lines(options.links):
        print(line)
    return result.svg


class Found(NamedTuple):
    """One simulation; a report and a picture tell it."""

    group: GroupPlans
    network: Network
    engine: Engine
    least: Bounds

    @classmethod
    def of(cls, group: GroupPlans, where: Topology, network: Network) -> Found:
        """Simulate the plans. Raises ValueError."""
        engine = simulate(group, where, network.fabrics)
        return cls(group, network, engine, bounds(group.call, where, network.fabrics))

    @property
    def title(self) -> str:
        return source.title_of(self.group.call, self.group.algorithm)

    def lines(self, links: int = SHOWN_LINKS) -> Iterator[str]:
        """Yield the report, with so many links; 0: all."""
        call, fabrics = self.group.call, self.network.fabrics
        yield self.title
        yield f"{self.engine.topology.name}, by a model with the costs of: {self.network.source}"
        if call.local > 1:
            yield f"  memory: {fabrics.memory.text}"
        if call.hosts > 1:
            yield f"  network: {fabrics.network.text}"
        yield from bound_lines(self.engine.seconds, self.least, call.ranks)
        yield from path_lines(critical_path(self.engine))
        yield from link_lines(self.engine, links)

    def svg(self) -> str:
        """Draw the messages over time. Raises ValueError where there are too many."""
        note = (
            f"{show_seconds(self.engine.seconds)} by a model with the costs of "
            f"{self.network.source}, on {self.engine.topology.name}, not measured."
        )
        return lanes.draw(self.title, [note], self.engine)


def bound_lines(seconds: float, least: Bounds, size: int) -> Iterator[str]:
    yield f"\ntime         {show_seconds(seconds)}"
    if size == 1 or least.seconds == 0:
        return
    share = f"{seconds / least.seconds:.2f} times the largest of these:"
    yield f"lower bound  {show_seconds(least.seconds)}; the time is {share}"
    rounds = (size - 1).bit_length()
    yield f"  latency    {show_seconds(least.latency)}   {rounds} messages one after another"
    cut = f"what must go {least.cut}" if least.cut else "no link between hosts"
    yield f"  bandwidth  {show_seconds(least.bandwidth)}   {cut}"
    yield f"  addition   {show_seconds(least.addition)}"
    if seconds < least.latency:
        yield "  (less than the latency's: a rank here sends to several at once)"


def path_lines(parts: Sequence[Part]) -> Iterator[str]:
    seconds = totals(parts)
    through = shortened([f"{host} > {other}" for host, other in hops(parts)])
    count = message_count(parts)
    if count:
        yield f"\ncritical path: {count} message{'s' * (count > 1)}, {through}"
    else:
        yield "\ncritical path: no message"
    for kind in ("latency", "transfer", "reduce", "copy"):
        if seconds[kind]:
            shared = f"   {show_seconds(seconds['shared'])} of it by sharing links"
            more = shared if kind == "transfer" and seconds["shared"] else ""
            yield f"  {kind:9}  {show_seconds(seconds[kind])}{more}"


def shortened(words: Sequence[str], most: int = 10) -> str:
    if len(words) > most:
        words = [*words[: most // 2], "…", *words[-most // 2 :]]
    return ", ".join(words)


def link_lines(engine: Engine, most: int) -> Iterator[str]:
    """Yield the busiest links first; those that carry nothing are counted."""
    links = engine.topology.links
    used = [number for number in range(len(links)) if engine.carried[number]]
    if not used:
        yield "\nno link between hosts carries bytes"
        return
    used.sort(key=lambda number: (-engine.carried[number] / links[number].rate, number))
    shown = used[:most] if most else used
    names = [f"{links[number].source} > {links[number].target}" for number in shown]
    wide = max(map(len, ["link", *names]))
    yield f"\n  {'link':{wide}}  {'bytes':>8}  {'rate':>9}  busy"
    for name, number in zip(names, shown, strict=True):
        carried, rate = engine.carried[number], links[number].rate
        busy = carried / rate / engine.seconds
        text = f"{show_size(carried):>8}  {show_rate(rate):>9}  {busy:4.0%}"
        yield f"  {name:{wide}}  {text}"
    if rest := len(used) - len(shown):
        yield f"  and {rest} more: --links 0 prints all"
    if idle := len(links) - len(used):
        yield f"  {idle} links carry nothing"
