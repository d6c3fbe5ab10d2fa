"""Messages that lack a partner: a recv without a send, a wait_signal without a signal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringcomm._flight.records import Operation
from ringcomm.tools.trace.findings import Finding, Kind, where
from ringcomm.tools.trace.job import YOUNG_NS, Group, Job, clock_text

ROWS = 12


@dataclass
class MessageCall:
    rank: int  # in the group
    operation: Operation

    @property
    def sending(self) -> bool:
        return self.operation.collective == "send"


def lonely_messages(job: Job) -> Iterator[Finding]:
    for group in job.groups:
        lonely = [
            message
            for message in waiting_in(group)
            if not has_partner(group, message) and not is_young(job, group, message)
        ]
        if lonely:
            yield tell(job, group, lonely)


def is_young(job: Job, group: Group, message: MessageCall) -> bool:
    """Tell whether it had not waited long, without a failure: its partner may have come later."""
    record = group.records[message.rank]
    age = job.age(record, message.operation)
    return not record.failure and age is not None and age < YOUNG_NS


def waiting_in(group: Group) -> list[MessageCall]:
    return [
        MessageCall(rank, operation)
        for rank, record in sorted(group.records.items())
        for operation in record.operations
        if operation.is_message and not operation.is_done
    ]


def opposite(group: Group, message: MessageCall) -> list[MessageCall]:
    """Return the messages of the other side that go this way, of any tag."""
    peer = message.operation.root
    sides = [peer] if peer is not None else list(group.records)
    other = "recv" if message.sending else "send"
    return [
        MessageCall(rank, operation)
        for rank in sides
        if rank in group.records
        for operation in group.records[rank].operations
        if operation.collective == other and operation.root in (message.rank, None)
        if operation.kind != "put"  # which nobody asks for
    ]


def has_partner(group: Group, message: MessageCall) -> bool:
    """Tell whether the other side has a message for it: they are paired by tag, in order.

    The k-th send with a tag is for the k-th recv. Old messages may have been overwritten, so the
    order is counted from the newest where that is so. Then only waiting ones count.
    """
    if message.operation.kind == "put":
        return True
    tag, peer = message.operation.splits, message.operation.root
    theirs = [other for other in opposite(group, message) if other.operation.splits == tag]
    own = [
        operation
        for operation in group.records[message.rank].operations
        if operation.kind == message.operation.kind
        and operation.splits == tag
        and operation.root == peer
    ]
    records = group.records.values()
    if peer is None or any(record.lost for record in records) or mixed(theirs):
        return any(not other.operation.is_done for other in theirs)
    return own.index(message.operation) < len(theirs)


def mixed(messages: list[MessageCall]) -> bool:
    """Tell whether some are for any rank: then numbers do not tell who got what."""
    return any(message.operation.root is None for message in messages)


def tell(job: Job, group: Group, lonely: list[MessageCall]) -> Finding:
    first = lonely[0]
    rows = []
    for message in lonely[:ROWS]:
        called = clock_text(job.called(group.records[message.rank], message.operation), 3)
        peer = message.operation.root
        rows.append(
            (
                str(group.ranks[message.rank]), message.operation.kind,
                "any rank" if peer is None else str(group.ranks[peer]),
                tag_of(message.operation), message.operation.arguments, called,
            )
        )  # fmt: skip
    more = f"; {len(lonely) - 1} other messages wait so too" if len(lonely) > 1 else ""
    return Finding(
        Kind.MESSAGE,
        f"{sentence(job, group, first)}{hint(group, first)}{more}",
        ("rank", "call", "peer", "tag", "tensor", "called at"),
        rows,
    )


def tag_of(operation: Operation) -> str:
    return str(operation.splits) if operation.window is None else f"window {operation.window}"


def sentence(job: Job, group: Group, message: MessageCall) -> str:
    rank, peer = group.ranks[message.rank], message.operation.root
    at = clock_text(job.called(group.records[message.rank], message.operation))
    name = message.operation.name
    other = "any rank" if peer is None else f"rank {group.ranks[peer]}"
    subject = "no rank" if peer is None else other
    never = "" if peer is None else "never "
    if message.sending:
        way, partner = f"its {name} to {other}", f"{subject} {never}called recv for it"
    else:
        gave = "sent it" if message.operation.window is None else "gave that signal"
        way, partner = f"a {name} from {other}", f"{subject} {never}{gave}"
    return f"rank {rank} waits in {way}{where(job, group)} since {at}, and {partner}"


def hint(group: Group, message: MessageCall) -> str:
    """Name a waiting message of the other side with another tag: the tags may be wrong."""
    for other in opposite(group, message):
        if not other.operation.is_done and not has_partner(group, other):
            return f" (rank {group.ranks[other.rank]} waits in a {other.operation.name} instead)"
    return ""
