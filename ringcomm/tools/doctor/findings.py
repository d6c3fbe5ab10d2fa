"""Judges the evidence: findings and remedies.

Each rule is a pure function from `Evidence` to some `Finding`; RULES lists them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ringcomm._runtime.addresses import number
from ringcomm._text import ranks_text, spans
from ringcomm.options import ATTRIBUTES, NETWORK, RANK_0, Setting, unknown_variables
from ringcomm.tools import load
from ringcomm.tools.doctor.endpoints import split
from ringcomm.tools.doctor.evidence import (
    Evidence,
    asker,
    by_value,
    machines,
    share_of,
    shares_memory,
    span_of,
)
from ringcomm.tools.doctor.facts import UNKNOWN, Facts
from ringcomm.tools.doctor.measure import Pair
from ringcomm.tools.doctor.probe import (
    CONNECTED,
    DROPPED,
    OTHER_SECRET,
    REFUSED,
    SILENT,
    STRANGER,
)

NOTE, WARNING, ERROR = "note", "warning", "error"
STATUS = {NOTE: 0, WARNING: 1, ERROR: 2}
CLOCK_SECONDS = 1.0
SLOW_RATE, SLOW_LATENCY = 5, 10  # times worse than the median
SLOW_SECONDS = 1e-3  # a latency below it is not called slow
FIREWALL = "docs/networks.md#which-ports"
BESIDE = 10  # descriptors of a process beside those for its peers
LITTLE_MEMORY = 256 << 20


@dataclass(frozen=True)
class Finding:
    """`severity`: note (nothing to do), warning (works, but badly) or error (cannot work)."""

    severity: str
    sentence: str
    remedy: str = ""


Rule = Callable[[Evidence], Iterator[Finding]]


def status_of(findings: Iterable[Finding]) -> int:
    return max((STATUS[finding.severity] for finding in findings), default=0)


def upper_first(text: str) -> str:
    """Begin a sentence; names of hosts stay as they are."""
    return text[:1].upper() + text[1:]


def on_host(facts: Facts, ranks: Iterable[int]) -> str:
    return f"{ranks_text(ranks)} on {facts.host}"


# ---- meeting


def store(evidence: Evidence) -> Iterator[Finding]:
    reached, where = evidence.reached, f"{evidence.reached.name}:{evidence.reached.port}"
    if evidence.alone or evidence.excluded:
        return
    answers = reached.answers
    if reached.error:
        remedy = "see that MASTER_ADDR and MASTER_PORT are rank 0's, and that the port is free"
        yield Finding(ERROR, f"The store at {where} cannot be used: {reached.error}.", remedy)
    elif answers and CONNECTED not in answers.values():
        told = "; ".join(f"{address}: {answer}" for address, answer in answers.items())
        own = 0 in evidence.ranks and evidence.own_store
        if own:
            sentence = f"Rank 0 serves the store, but does not reach itself at {where}: {told}."
            yield Finding(WARNING, sentence, "give MASTER_ADDR an address of rank 0's host")
            return
        remedy = f"open port {reached.port} on that host, and see that rank 0 was started"
        if reached.loopback:
            remedy = "this is loopback: start rank 0 on this host, or give MASTER_ADDR its address"
        elif any(answer == REFUSED for answer in answers.values()):
            remedy = "nobody listens there: see that rank 0 runs, and that MASTER_ADDR is its host"
        elif any(answer.startswith("unreachable") for answer in answers.values()):
            remedy = "there is no way to that host: look at `ip route` and at the interfaces"
        yield Finding(ERROR, f"The store at {where} does not answer: {told}.", remedy)
    elif reached.loopback and len(machines(evidence)) > 1:
        sentence = f"MASTER_ADDR={reached.name} is a loopback address on some hosts."
        yield Finding(WARNING, sentence, "give it rank 0's address by number")


def absent(evidence: Evidence) -> Iterator[Finding]:
    if evidence.excluded:
        sentence = (
            f"{upper_first(ranks_text(evidence.ranks))} came when the others had given it up."
        )
        yield Finding(ERROR, sentence, "start all ranks within some seconds")
        return
    missing = set(range(evidence.world)) - set(evidence.ranks)
    if missing and evidence.met and (evidence.called or not evidence.silent):
        sentence = f"{upper_first(ranks_text(missing))} never came."
        remedy = (
            "see the output there: was it started, with the same MASTER_ADDR, MASTER_PORT and "
            f"WORLD_SIZE={evidence.world}?"
        )
        yield Finding(ERROR, sentence, remedy)


def lost(evidence: Evidence) -> Iterator[Finding]:
    for stage in sorted(set(evidence.lost.values())):
        ranks = [rank for rank, silent_stage in evidence.lost.items() if silent_stage == stage]
        sentence = f"{upper_first(ranks_text(ranks))} fell silent while {stage}."
        yield Finding(ERROR, sentence, "see the output there: the process or its host has ended")
    if evidence.silent:
        where = f"{evidence.reached.name}:{evidence.reached.port}"
        what = "" if evidence.called else " before all ranks were called"
        sentence = (
            f"The store at {where} took the connection of this rank and fell "
            f"silent{what}: {evidence.broken}."
        )
        remedy = (
            "see whether rank 0's process and host live, and whether a firewall between drops "
            "the traffic of open connections"
        )
        yield Finding(ERROR, sentence, remedy)
    elif evidence.broken:
        yield Finding(
            ERROR,
            f"The examination ended early: {evidence.broken}.",
            "what is missing above was not found out; see whether rank 0's process lives",
        )


# ---- each rank by itself


def library(evidence: Evidence) -> Iterator[Finding]:
    for error, ranks in by_value(evidence, lambda facts: facts.library_error).items():
        sentence = f"The library does not load on {ranks_text(ranks)}: {error}."
        yield Finding(ERROR, sentence, "install ringcomm there again, for the torch that is there")


def versions(evidence: Evidence) -> Iterator[Finding]:
    groups = by_value(evidence, lambda facts: facts.build if facts.build != UNKNOWN else "")
    if len(groups) > 1:
        told = ", ".join(f"{build} on {ranks_text(ranks)}" for build, ranks in groups.items())
        sentence = f"Ranks have different builds of ringcomm: {told}."
        yield Finding(ERROR, sentence, "install the same version everywhere")
    for name in ("torch", "python"):
        groups = by_value(evidence, lambda facts: str(getattr(facts, name)))  # noqa: B023
        if len(groups) > 1:
            told = ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in groups.items())
            yield Finding(WARNING, f"Ranks have different versions of {name}: {told}.",
                          "install the same everywhere")  # fmt: skip


def settings(evidence: Evidence) -> Iterator[Finding]:
    for setting in ATTRIBUTES.values():
        for ranks in needing_alike(evidence, setting):
            groups: dict[str, list[int]] = defaultdict(list)
            for rank in ranks:
                text = text_of(evidence.ranks[rank], setting)
                groups[text or str(setting.default)].append(rank)
            if len(groups) > 1:
                told = ", ".join(
                    f"{text_of(evidence.ranks[same[0]], setting) or '(not set)'} on "
                    f"{ranks_text(same)}"
                    for same in groups.values()
                )
                sentence = f"{setting.variable} differs: {told}."
                yield Finding(ERROR, sentence, "set it to the same on every rank")
    named = {name for facts in evidence.ranks.values() for name in facts.settings}
    for name, meant in unknown_variables(sorted(named)):
        ranks = [rank for rank, facts in evidence.ranks.items() if name in facts.settings]
        sentence = f"{name} is set on {ranks_text(ranks)}, and no such setting is known."
        yield Finding(WARNING, sentence, f"did you mean {meant}? docs/options.md lists them all")


def text_of(facts: Facts, setting: Setting[Any]) -> str:
    """Return what the variable says there; "" where it is not set."""
    text = facts.settings.get(setting.variable, "")
    # A secret may be in a file; of either only "(set)" is told.
    return text or facts.settings.get(f"{setting.variable}_FILE", "")


def needing_alike(evidence: Evidence, setting: Setting[Any]) -> list[list[int]]:
    """Return the sets of ranks in which the setting must be the same, or no group is made."""
    ranks = sorted(evidence.ranks)
    if setting.alike == NETWORK:
        tcp = any(facts.tcp for facts in evidence.ranks.values())
        return [ranks] if tcp or len(machines(evidence)) > 1 else []
    if setting.alike == RANK_0:  # the others may leave it to rank 0
        return [[r for r in ranks if r == 0 or text_of(evidence.ranks[r], setting)]]
    return []


def descriptors(evidence: Evidence) -> Iterator[Finding]:
    for rank, facts in sorted(evidence.ranks.items()):
        text = facts.settings.get("RINGCOMM_FLOWS", "auto")
        flows = int(text) if text.isdigit() else 1  # auto: one, until more are useful
        local = sum(1 for other in evidence.ranks.values() if other.machine == facts.machine) - 1
        needed = local + flows * (evidence.world - 1 - local) + BESIDE
        limit, used = facts.descriptors_limit, facts.descriptors_open
        if limit < 0 or limit - max(used, 0) >= needed + 64:
            continue
        severity = ERROR if limit - max(used, 0) < needed else WARNING
        counted = f", of which {used} are in use" if used >= 0 else ""
        sentence = (
            f"{upper_first(on_host(facts, [rank]))} may open {limit} descriptors{counted}; "
            f"ringcomm needs {needed}."
        )
        yield Finding(severity, sentence, "set `ulimit -n 65536` before the program starts")


def secret_files(evidence: Evidence) -> Iterator[Finding]:
    for rank, facts in sorted(evidence.ranks.items()):
        if facts.secret_error:
            said = f"Rank {rank} on {facts.host} cannot have the secret: {facts.secret_error}."
            yield Finding(ERROR, said, "see docs/security.md on the file of the secret")


def memory(evidence: Evidence) -> Iterator[Finding]:
    for ranks in machines(evidence).values():
        facts = evidence.ranks[ranks[0]]
        for error in sorted({evidence.ranks[rank].memfd_error for rank in ranks} - {""}):
            sentence = f"{facts.host} reserves no shared memory: {error}."
            yield Finding(ERROR, sentence, "see the limits of memory, and what seccomp forbids")
        free = facts.memory_available
        if facts.memory_limit >= 0:
            free = min(free, facts.memory_limit - facts.memory_used)
        if 0 <= free < LITTLE_MEMORY:
            sentence = f"{facts.host} has {free >> 20} MiB of memory left for {ranks_text(ranks)}."
            yield Finding(WARNING, sentence, "raise the limit of the cgroup, or start fewer ranks")
        if facts.oom_kills > 0:
            sentence = f"The OOM killer has ended {facts.oom_kills} processes of this cgroup."
            yield Finding(NOTE, f"{facts.host}: {sentence}", "see `dmesg` there")


def cores(evidence: Evidence) -> Iterator[Finding]:
    for ranks in machines(evidence).values():
        facts = evidence.ranks[ranks[0]]
        if 0 < facts.cores < len(ranks):
            sentence = f"{facts.host} has too few cores: {facts.cores:g} for {ranks_text(ranks)}."
            yield Finding(NOTE, sentence, "ranks of a job will wait for one another's cores")


def busy(evidence: Evidence) -> Iterator[Finding]:
    """Find hosts on which others used what the ranks need, while these were measured."""
    for ranks in machines(evidence).values():
        facts = evidence.ranks[ranks[0]]
        others, share = span_of(evidence, ranks).others, share_of(evidence, ranks)
        if load.in_doubt(share) and others is not None:
            sentence = (
                f"Other processes on {facts.host} used {others:.2g} of {facts.cores:g} cores while "
                "the pairs were measured, so figures of that host are in doubt."
            )
            yield Finding(NOTE, sentence, "run it again when the host is idle")


def names(evidence: Evidence) -> Iterator[Finding]:
    hosts: dict[str, list[list[int]]] = defaultdict(list)
    for ranks in machines(evidence).values():
        hosts[evidence.ranks[ranks[0]].host].append(ranks)
    for host, groups in hosts.items():
        if len(groups) > 1 and host != UNKNOWN:
            told = " and ".join(ranks_text(ranks) for ranks in groups)
            sentence = f"{len(groups)} hosts have one name, {host}: those of {told}."
            remedy = "ringcomm tells them apart, logs do not: `hostnamectl set-hostname` names one"
            yield Finding(WARNING, sentence, remedy)


def cuda(evidence: Evidence) -> Iterator[Finding]:
    for ranks in machines(evidence).values():
        some = [evidence.ranks[rank] for rank in ranks]
        told = some[0].cuda
        if told.get("error"):
            yield Finding(WARNING, f"{some[0].host}: CUDA does not start: {told['error']}.",
                          "see `nvidia-smi` there, and the driver's version")  # fmt: skip
        elif told.get("driver") and not told.get("torch"):
            sentence = f"{some[0].host} has an NVIDIA driver, and a torch without CUDA."
            yield Finding(NOTE, sentence, "install torch with CUDA to use its GPUs")
        elif told.get("torch") and told.get("gpus") and not told.get("library"):
            sentence = f"{some[0].host} has GPUs, and a ringcomm that serves CPU tensors only."
            remedy = "`pip install ringcomm-cuda`, or build it where nvcc is, with RINGCOMM_CUDA=on"
            yield Finding(NOTE, sentence, remedy)
        if told.get("gpus") and not told.get("peers", True):
            sentence = f"Some GPUs of {some[0].host} cannot access one another's memory."
            yield Finding(NOTE, sentence, "their tensors go through memory of the host")
        apart = {(facts.ipc_namespace, facts.pid_namespace) for facts in some}
        if told.get("gpus") and len(apart) > 1:
            sentence = f"{upper_first(ranks_text(ranks))} have different IPC or PID namespaces."
            remedy = "CUDA tensors go through the host: use `docker run --ipc=host --pid=host`"
            yield Finding(WARNING, sentence, remedy)


# ---- between ranks


def listening(evidence: Evidence) -> Iterator[Finding]:
    many = len(machines(evidence)) > 1
    for rank, facts in sorted(evidence.ranks.items()):
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
    address_number = number(split(address)[0])
    return address_number is not None and address_number.is_loopback


def apart(evidence: Evidence) -> Iterator[Finding]:
    """Find ranks of one machine that share no memory, where that is a surprise."""
    told: dict[str, list[int]] = defaultdict(list)
    for (rank, peer), link in sorted(evidence.links.items()):
        if link.memory not in ("", "shared"):
            told[link.memory] += [rank, peer]
    for rank, facts in sorted(evidence.ranks.items()):
        for peer, theirs in sorted(evidence.ranks.items()):
            why = shares_memory(facts, theirs)
            if rank < peer and facts.machine == theirs.machine and why and not facts.tcp:
                told[why] += [rank, peer]
    for why, ranks in told.items():
        sentence = f"{upper_first(ranks_text(ranks))} are on one host and use TCP: {why}."
        remedy = "run them as one user, with a whole /proc; results are right, and slower"
        yield Finding(WARNING, sentence, remedy)


def unreached(evidence: Evidence) -> Iterator[Finding]:
    """Find pairs without any connection, and pairs that only one side can connect."""
    for (source, target), ranks in by_hosts(evidence, both=True).items():
        near, far = evidence.ranks[source], evidence.ranks[target]
        sentence = f"{upper_first(on_host(near, ranks[0]))} and {on_host(far, ranks[1])} cannot "
        sentence += "reach one another."
        yield Finding(ERROR, sentence, "ringcomm needs one direction at least: see what follows")


def by_hosts(evidence: Evidence, both: bool) -> dict[tuple[int, int], tuple[set[int], set[int]]]:
    """Return the pairs that no side connects, by the first ranks of their two hosts."""
    first = {rank: ranks[0] for ranks in machines(evidence).values() for rank in ranks}
    groups: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
    for low in evidence.ranks:
        for high in evidence.ranks:
            there = {(low, high), (high, low)} & set(evidence.links)
            if low >= high or not there or low in evidence.lost or high in evidence.lost:
                continue
            if (asker(evidence.links, low, high)[0] < 0) == both:
                ends = groups.setdefault((first[low], first[high]), (set(), set()))
                ends[0].add(low)
                ends[1].add(high)
    return groups


def answers(evidence: Evidence) -> Iterator[Finding]:
    """Find addresses that answered something else than a connection, by host and answer."""
    first = {rank: ranks[0] for ranks in machines(evidence).values() for rank in ranks}
    groups: dict[tuple[int, int, str, str], tuple[set[int], set[int], bool]] = {}
    for (rank, peer), link in sorted(evidence.links.items()):
        for address, answer in link.answers.items():
            if answer == CONNECTED or peer in evidence.lost or on_loopback(address):
                continue
            host, port = split(address)
            key = first[rank], first[peer], host, answer
            sources, ports, needed = groups.get(key, (set(), set(), False))
            needed = needed or not link.reaches
            groups[key] = sources | {rank}, ports | {port}, needed
    for (source, target, host, answer), (sources, ports, needed) in groups.items():
        closed = evidence.closed.get((min(sources), host), DROPPED)
        severity = WARNING if needed else NOTE
        whom = on_host(evidence.ranks[source], sources)
        there = f"{evidence.ranks[target].host} at {host}"
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


def mtu(evidence: Evidence) -> Iterator[Finding]:
    stalls: dict[tuple[str, int], list[int]] = defaultdict(list)
    differ: set[tuple[str, ...]] = set()
    for pair in evidence.pairs.values():
        near_rank, far_rank = (evidence.ranks[rank] for rank in pair.ranks)
        near, far = interface(near_rank, pair.local), interface(far_rank, pair.remote)
        if loses_large(pair):
            ends = [near_rank.host, far_rank.host]
            forth = pair.trouble.endswith("forth")
            way = " to ".join(ends if forth else ends[::-1])
            stalls[way, (near if forth else far)[1]] += pair.ranks
        elif near[1] and far[1] and near[1] != far[1]:
            sides = ((near_rank.host, *near), (far_rank.host, *far))
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
    for interface in facts.interfaces:
        if interface["address"] == address and not interface["loopback"]:
            return str(interface["name"]), int(interface["mtu"])
    return "", 0


def clock(evidence: Evidence) -> Iterator[Finding]:
    seen = set()
    for pair in evidence.pairs.values():
        hosts = tuple(evidence.ranks[rank].host for rank in pair.ranks if rank in evidence.ranks)
        if abs(pair.offset) > CLOCK_SECONDS + pair.round_trip and hosts not in seen:
            seen.add(hosts)
            words = "ahead of" if pair.offset > 0 else "behind"
            sentence = (
                f"The clock of {hosts[-1]} is {abs(pair.offset):.1f} s {words} that of {hosts[0]}."
            )
            remedy = "let chrony or NTP set both; ringcomm needs no clock, reading logs does"
            yield Finding(WARNING, sentence, remedy)


def slow(evidence: Evidence) -> Iterator[Finding]:
    """Find pairs of hosts that are much slower than most; the best pair of ranks counts."""
    best: dict[tuple[str, str], list[float]] = {}
    for pair in evidence.pairs.values():
        if pair.trouble or not pair.forth or not pair.back or not pair.remote:
            continue
        near, far = (evidence.ranks[rank] for rank in pair.ranks)
        if near.machine != far.machine:
            low, high = sorted((near.host, far.host))
            known = best.setdefault((low, high), [0.0, 1e9])
            known[0] = max(known[0], min(pair.forth, pair.back))
            known[1] = min(known[1], pair.latency)
    if len(best) < 3:
        return
    rate = statistics.median(figures[0] for figures in best.values())
    latency = statistics.median(figures[1] for figures in best.values())
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


def unmeasured(evidence: Evidence) -> Iterator[Finding]:
    broken = [
        pair for pair in evidence.pairs.values()
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
        (low, high) for low in evidence.ranks for high in evidence.ranks
        if low < high and asker(evidence.links, low, high)[0] >= 0
    } - {(min(ranks), max(ranks)) for ranks in evidence.pairs}  # fmt: skip
    if wanted and not evidence.lost and not evidence.broken:
        yield Finding(NOTE, f"There was no time to measure {len(wanted)} pairs.")


RULES: list[Rule] = [
    *(store, absent, lost, library, versions, settings),
    *(listening, unreached, answers, apart, mtu),
    *(descriptors, secret_files, memory, names, clock, slow, unmeasured, cuda, cores, busy),
]


def judge(evidence: Evidence) -> list[Finding]:
    """Return what all rules say, the worst first."""
    told = list(dict.fromkeys(finding for rule in RULES for finding in rule(evidence)))
    return sorted(told, key=lambda finding: -STATUS[finding.severity])
