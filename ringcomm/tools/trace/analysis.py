"""The analysis of a job: all findings, the one that matters most first."""

from __future__ import annotations

from collections.abc import Iterator

from ringcomm._text import ranks_text, spans
from ringcomm.tools.trace.findings import COLUMNS, Finding, Kind, table, where
from ringcomm.tools.trace.job import Group, Job, clock_text
from ringcomm.tools.trace.messages import lonely_messages
from ringcomm.tools.trace.slow import networks, slow_networks, stragglers
from ringcomm.tools.trace.waiting import line_of, waiting


def analyse(job: Job) -> list[Finding]:
    """Return what is wrong, causes first; nothing where all is well."""
    findings = [*mismatches(job), *lost(job), *waiting(job), *lonely_messages(job), *networks(job)]
    findings += failures(job)
    findings += [*stragglers(job), *slow_networks(job)]
    return sorted(findings, key=order)


def order(finding: Finding) -> tuple[bool, int, float]:
    """Return what sorts findings: of what is only slow, the one that costs most comes first."""
    return finding.follows, min(finding.kind, Kind.NETWORK), -finding.lost


def mismatches(job: Job) -> Iterator[Finding]:
    """Find the first collective of each group that the ranks called differently."""
    for group in job.groups:
        if group.differing:
            yield mismatch(job, group, min(group.differing))


def mismatch(job: Job, group: Group, sequence: int) -> Finding:
    calls = group.calls[sequence]
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank, operation in calls.items():
        kinds.setdefault(operation.call, []).append(rank)
    parts = [
        f"{group.say(ranks)} called {calls[ranks[0]].collective} "
        f"{calls[ranks[0]].arguments}".rstrip()
        + line_of(group, group.ranks[ranks[0]])
        for ranks in sorted(kinds.values(), key=len)
    ]
    agreed = [n for n, some in group.calls.items() if n < sequence]
    last = next(iter(group.calls[agreed[-1]].values())).name if agreed else "none"
    more = f", and {len(parts) - 3} others differ too" if len(parts) > 3 else ""
    return Finding(
        Kind.MISMATCH,
        f"the ranks differ in collective #{sequence}{where(job, group)}: "
        f"{', '.join(parts[:3])}{more}; the last that they agreed on is {last}",
        COLUMNS,
        table(job, group, sequence),
    )


def lost(job: Job) -> Iterator[Finding]:
    """Name the processes that are gone though nothing has failed: somebody has ended them."""
    if not job.lost or job.has_failed or job.is_alive:
        return
    ranks = [record.global_rank for record in job.lost]
    seen = max(record.seen_ns for record in job.lost)
    when = f"; the last sign of life is of {clock_text(seen)}" if seen else ""
    if len(ranks) < len(job.lives):
        yield Finding(
            Kind.GONE,
            f"{ranks_text(ranks)} left neither an end nor a failure in the record, and the "
            f"process is gone: it was killed, it seems{when}",
        )
        return
    who = f"all {len(ranks)} processes are" if len(ranks) > 1 else "the process is"
    yield Finding(
        Kind.GONE,
        f"{who} gone; no failure was recorded: the job was canceled or killed, it seems{when}",
    )


def failures(job: Job) -> Iterator[Finding]:
    """Give the words of groups that failed: each text once."""
    said: dict[tuple[str, str], list[int]] = {}
    for group in job.groups:
        for rank, record in sorted(group.records.items()):
            if record.failure:
                said.setdefault((group.name, record.failure), []).append(group.ranks[rank])
    if said:
        (name, text), ranks = next(iter(said.items()))
        rows = [(spans(some), group, text) for (group, text), some in said.items()]
        yield Finding(
            Kind.FAILED,
            f"group {name} failed on {ranks_text(ranks)}: {text}",
            ("rank", "group", "why it failed there"),
            rows,
        )
