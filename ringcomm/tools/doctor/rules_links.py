"""Rules about what lies between ranks: addresses, firewalls, packets, clocks and speed."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

from ringcomm._runtime.addresses import number
from ringcomm._text import ranks_text, spans
from ringcomm.tools.doctor.endpoints import split
from ringcomm.tools.doctor.facts import Facts
from ringcomm.tools.doctor.measure import Pair
from ringcomm.tools.doctor.probe import (
    CONNECTED,
    DROPPED,
    OTHER_SECRET,
    REFUSED,
    SILENT,
    STRANGER,
)
from ringcomm.tools.doctor.stages import Findings, asker, shares_memory
from ringcomm.tools.doctor.words import (
    ERROR,
    NOTE,
    WARNING,
    Finding,
    machines,
    on_host,
    upper_first,
)

CLOCK_SECONDS = 1.0
SLOW_RATE, SLOW_LATENCY = 5, 10  # times worse than the median
SLOW_SECONDS = 1e-3  # a latency below it is not called slow
FIREWALL = "docs/networks.md#which-ports"


# ---- between ranks


def listening(found: Findings) -> Iterator[Finding]:
    many = len(machines(found)) > 1
    for rank, facts in sorted(found.ranks.items()):
        if facts.listen_error and not facts.addresses:
            severity = ERROR if many or "RINGCOMM_IFNAME" in facts.listen_error else WARNING
            told = facts.listen_error.rstrip(".")
            sentence = f"{upper_first(on_host(facts, [rank]))} listens nowhere: {told}."
            remedy = "choose an interface that is up: docs/networks.md#which-addresses"
            yield Finding(severity, sentence, remedy)
        elif many and all(on_loopback(address) for address in facts.addresses):
            told = ", ".join(facts.addresses) or "no address"
            sentence = (
                f"{upper_first(on_host(facts, [rank]))} listens at {told}, where no other host "
                "reaches it."
            )
            remedy = "choose another interface with RINGCOMM_IFNAME: `ip -br address` lists them"
            yield Finding(ERROR, sentence, remedy)


def on_loopback(address: str) -> bool:
    found = number(split(address)[0])
    return found is not None and found.is_loopback


def apart(found: Findings) -> Iterator[Finding]:
    """Ranks of one machine that share no memory, where that is a surprise."""
    told: dict[str, list[int]] = defaultdict(list)
    for (one, other), link in sorted(found.links.items()):
        if link.memory not in ("", "shared"):
            told[link.memory] += [one, other]
    for one, facts in sorted(found.ranks.items()):
        for other, theirs in sorted(found.ranks.items()):
            why = shares_memory(facts, theirs)
            if one < other and facts.machine == theirs.machine and why and not facts.tcp:
                told[why] += [one, other]
    for why, ranks in told.items():
        sentence = f"{upper_first(ranks_text(ranks))} are on one host and use TCP: {why}."
        remedy = "run them as one user, with a whole /proc; results are right, and slower"
        yield Finding(WARNING, sentence, remedy)


def unreached(found: Findings) -> Iterator[Finding]:
    """Pairs without any connection, and pairs that only one side can connect."""
    for (source, target), ranks in by_hosts(found, both=True).items():
        one, other = found.ranks[source], found.ranks[target]
        sentence = f"{upper_first(on_host(one, ranks[0]))} and {on_host(other, ranks[1])} cannot "
        sentence += "reach one another."
        yield Finding(ERROR, sentence, "ringcomm needs one direction at least: see what follows")


def by_hosts(found: Findings, both: bool) -> dict[tuple[int, int], tuple[set[int], set[int]]]:
    """Return the pairs that no side connects, by the first ranks of their two hosts."""
    first = {rank: ranks[0] for ranks in machines(found).values() for rank in ranks}
    groups: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
    for low in found.ranks:
        for high in found.ranks:
            there = {(low, high), (high, low)} & set(found.links)
            if low >= high or not there or low in found.lost or high in found.lost:
                continue
            if (asker(found.links, low, high)[0] < 0) == both:
                ends = groups.setdefault((first[low], first[high]), (set(), set()))
                ends[0].add(low)
                ends[1].add(high)
    return groups


def answers(found: Findings) -> Iterator[Finding]:
    """What addresses answered instead of a connection, by host and answer."""
    first = {rank: ranks[0] for ranks in machines(found).values() for rank in ranks}
    groups: dict[tuple[int, int, str, str], tuple[set[int], set[int], bool]] = {}
    for (one, other), link in sorted(found.links.items()):
        for address, answer in link.answers.items():
            if answer == CONNECTED or other in found.lost or on_loopback(address):
                continue
            host, port = split(address)
            key = first[one], first[other], host, answer
            sources, ports, needed = groups.get(key, (set(), set(), False))
            needed = needed or not link.reaches
            groups[key] = sources | {one}, ports | {port}, needed
    for (source, target, host, answer), (sources, ports, needed) in groups.items():
        closed = found.closed.get((min(sources), host), DROPPED)
        severity = WARNING if needed else NOTE
        whom = on_host(found.ranks[source], sources)
        there = f"{found.ranks[target].host} at {host}"
        yield explain(severity, whom, there, (answer, closed), spans(ports))


def explain(severity: str, whom: str, there: str, told: tuple[str, str], ports: str) -> Finding:
    """Put an answer into words; `told` has that of the port, and that of a closed port there."""
    answer, closed = told
    word = f"port{'' if ports.isdecimal() else 's'} {ports}"
    connections = f"Connections of {whom} to {there}, {word},"
    if answer == DROPPED and closed in (REFUSED, CONNECTED):
        sentence = (
            f"A firewall drops packets of {whom} to {there}, {word}; "
            "other ports of that host do answer."
        )
        remedy = f"open {word} there, or a range given as RINGCOMM_PORTS: {FIREWALL}"
    elif answer == DROPPED:
        sentence = f"{connections} time out."
        remedy = (
            f"if a firewall there or between drops them, open {word} ({FIREWALL}); "
            "if the address is of another network, choose one with RINGCOMM_IFNAME"
        )
    elif answer == REFUSED:
        sentence = f"{connections} are refused."
        remedy = (
            "a firewall there answers with resets, or the address is another machine's: "
            "let it be silent or open, or choose an interface with RINGCOMM_IFNAME"
        )
    elif answer in (STRANGER, SILENT):
        sentence = f"{connections} are answered by another process, or by none."
        remedy = "every host may have this address, as docker0: RINGCOMM_IFNAME=^docker,br-"
    elif answer == OTHER_SECRET:
        sentence = f"{upper_first(whom)} and {there} have different secrets."
        remedy = "give every rank the same RINGCOMM_SECRET or RINGCOMM_SECRET_FILE"
    elif answer == "no descriptor":
        sentence = f"{connections} fail: no descriptor is left."
        remedy = "set `ulimit -n 65536` before the program starts"
    else:
        sentence = f"{connections} fail: {answer.removeprefix('unreachable: ')}."
        remedy = "look at `ip route` there, or choose another interface with RINGCOMM_IFNAME"
    return Finding(severity, sentence, remedy)


# ---- figures


def mtu(found: Findings) -> Iterator[Finding]:
    stalls: dict[tuple[str, int], list[int]] = defaultdict(list)
    differ: set[tuple[str, ...]] = set()
    for pair in found.pairs.values():
        one, other = (found.ranks[rank] for rank in pair.ranks)
        near, far = interface(one, pair.local), interface(other, pair.remote)
        if loses_large(pair):
            ends = [one.host, other.host]
            forth = pair.trouble.endswith("forth")
            way = " to ".join(ends if forth else ends[::-1])
            stalls[way, (near if forth else far)[1]] += pair.ranks
        elif near[1] and far[1] and near[1] != far[1]:
            sides = ((one.host, *near), (other.host, *far))
            told = [f"{name} of {host} has an MTU of {size} bytes" for host, name, size in sides]
            differ.add(tuple(sorted(told)))
    for (way, size), ranks in stalls.items():
        sentence = (
            f"From {way} small messages pass and large ones do not ({ranks_text(ranks)}): "
            f"packets of up to {size} bytes get lost."
        )
        remedy = (
            "give the interfaces the smallest MTU on the way (`ip link set eth0 mtu 1400`), "
            "and let ICMP pass"
        )
        yield Finding(ERROR, sentence, remedy)
    for left, right in sorted(differ):
        remedy = "give both interfaces one MTU, which the switches between have too"
        yield Finding(WARNING, f"{upper_first(left)}, and {right}.", remedy)


def loses_large(pair: Pair) -> bool:
    """Tell whether large packets got lost; a rank that merely stood still retransmits nothing."""
    retransmits = pair.retransmits > 0 or pair.trouble.endswith("back")  # the other side's
    return pair.trouble.startswith("stalled") and retransmits


def interface(facts: Facts, address: str) -> tuple[str, int]:
    """Return name and MTU of the interface with that address."""
    for each in facts.interfaces:
        if each["address"] == address and not each["loopback"]:
            return str(each["name"]), int(each["mtu"])
    return "", 0


def clock(found: Findings) -> Iterator[Finding]:
    seen = set()
    for pair in found.pairs.values():
        hosts = tuple(found.ranks[rank].host for rank in pair.ranks if rank in found.ranks)
        if abs(pair.offset) > CLOCK_SECONDS + pair.round_trip and hosts not in seen:
            seen.add(hosts)
            words = "ahead of" if pair.offset > 0 else "behind"
            sentence = (
                f"The clock of {hosts[-1]} is {abs(pair.offset):.1f} s {words} that of {hosts[0]}."
            )
            remedy = "let chrony or NTP set both; ringcomm needs no clock, reading logs does"
            yield Finding(WARNING, sentence, remedy)


def slow(found: Findings) -> Iterator[Finding]:
    """Pairs of hosts that are much slower than most; the best pair of ranks counts."""
    best: dict[tuple[str, str], list[float]] = {}
    for pair in found.pairs.values():
        if pair.trouble or not pair.forth or not pair.back or not pair.remote:
            continue
        one, other = (found.ranks[rank] for rank in pair.ranks)
        if one.machine != other.machine:
            low, high = sorted((one.host, other.host))
            known = best.setdefault((low, high), [0.0, 1e9])
            known[0] = max(known[0], min(pair.forth, pair.back))
            known[1] = min(known[1], pair.latency)
    if len(best) < 3:
        return
    rate = statistics.median(each[0] for each in best.values())
    latency = statistics.median(each[1] for each in best.values())
    for (one_host, other_host), (mine, time) in sorted(best.items()):
        between = f"Between {one_host} and {other_host}"
        if mine < rate / SLOW_RATE:
            sentence = f"{between} pass {mine / 1e6:.3g} MB/s; the median is {rate / 1e6:.3g} MB/s."
            yield Finding(WARNING, sentence, "look at `ethtool` on both: speed, errors, duplex")
        if time > max(SLOW_LATENCY * latency, SLOW_SECONDS):
            sentence = (
                f"{between} a message takes {time * 1e3:.3g} ms; "
                f"the median is {latency * 1e3:.3g} ms."
            )
            yield Finding(WARNING, sentence, "see which way the packets take: `traceroute`")


def unmeasured(found: Findings) -> Iterator[Finding]:
    broken = [
        pair for pair in found.pairs.values()
        if pair.trouble and not loses_large(pair)
    ]  # fmt: skip
    for trouble in sorted({pair.trouble for pair in broken}):
        ranks = [rank for pair in broken if pair.trouble == trouble for rank in pair.ranks]
        sentence = f"The connections between {ranks_text(ranks)} broke: {trouble}."
        yield Finding(
            WARNING,
            sentence,
            "run it again on idle hosts; then see the switch, and the firewall's logs",
        )
    wanted = {
        (low, high) for low in found.ranks for high in found.ranks
        if low < high and asker(found.links, low, high)[0] >= 0
    } - {(min(ranks), max(ranks)) for ranks in found.pairs}  # fmt: skip
    if wanted and not found.lost and not found.broken:
        yield Finding(NOTE, f"There was no time to measure {len(wanted)} pairs.")
