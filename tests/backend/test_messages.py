"""send and recv: tags, any source, many outstanding, batches, objects."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import limit
from lab.oracle import bits, values
from lab.outcomes import Outcome, in_child, rank_of
from lab.ranks import Rank, Ranks, error_of, join
from lab.ranks import ranks as some_ranks


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    some = Ranks(request.param)
    yield some
    some.leave()


def check_tags(rank: Rank) -> None:
    """Large and small, received in another order than they were sent."""
    sizes = [0, 1, 100, 20_000, 300_000]
    me, n = rank.index, rank.size
    works, received = [], []
    for other in rank.others:
        for tag, size in enumerate(sizes):
            works.append(dist.isend(values(me, size, torch.float32, tag), other, tag=tag))
    for other in reversed(rank.others):
        for tag, size in reversed(list(enumerate(sizes))):
            received.append((other, tag, torch.empty(size)))
            works.append(dist.irecv(received[-1][2], other, tag=tag))
    for work in works:
        work.wait()
    for other, tag, tensor in received:
        assert bits(tensor) == bits(values(other, sizes[tag], torch.float32, tag)), (n, other, tag)


def check_any_source(rank: Rank) -> None:
    if rank.index != 0:
        dist.send(torch.tensor([rank.index]), 0, tag=5)
        dist.send(torch.full((70_000,), rank.index), 0, tag=6)
        return
    for tag, count in ((5, 1), (6, 70_000)):
        sources = set()
        for _ in rank.others:
            tensor = torch.empty(count, dtype=torch.int64)
            source = dist.recv(tensor, tag=tag)
            assert tensor.eq(source).all()
            sources.add(source)
        assert sources == set(rank.others)


def check_unwanted_first(rank: Rank) -> None:
    """A large message that nobody receives yet does not hold up what follows."""
    big, small = torch.full((500_000,), 7.0), torch.tensor([1.0])
    if rank.index == 0:
        work = dist.isend(big, 1, tag=1)
        dist.send(small, 1, tag=2)
        work.wait()
    elif rank.index == 1:
        first, second = torch.zeros(1), torch.zeros(500_000)
        dist.recv(first, 0, tag=2)
        dist.recv(second, 0, tag=1)
        assert first.item() == 1
        assert second.eq(7).all()
    dist.barrier()


def check_batch(rank: Rank) -> None:
    after, before = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size
    out, into = torch.full((3000,), float(rank.index)), torch.empty(3000)
    ops = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert into.eq(before).all()
    objects: list[Any] = [{"rank": rank.index}] if rank.index == 0 else [None]
    dist.broadcast_object_list(objects, 0)
    gathered: list[Any] = [None] * rank.size
    dist.all_gather_object(gathered, ("x" * rank.index, rank.index))
    assert objects == [{"rank": 0}]
    assert gathered == [("x" * other, other) for other in range(rank.size)]


@pytest.mark.parametrize("check", [check_tags, check_any_source, check_unwanted_first, check_batch])
def test_messages(ranks: Ranks, check: Any) -> None:
    ranks(check)


def check_crossing(rank: Rank) -> None:
    """Everybody sends much to everybody before anybody receives; then the other way round."""
    for big_first in (True, False):
        works, received = [], []
        sizes = [400_000, 10] if big_first else [10, 400_000]
        for size in sizes:
            works += [dist.isend(torch.full((size,), rank.index), other) for other in rank.others]
        for size in sizes:
            for other in rank.others:
                received.append((other, torch.empty(size, dtype=torch.int64)))
                works.append(dist.irecv(received[-1][1], other))
        for work in works:
            work.wait()
        assert all(tensor.eq(other).all() for other, tensor in received)


def check_many(rank: Rank) -> None:
    """Hundreds outstanding in each direction; those of one sender and tag keep their order."""
    count = 300
    inbox = [[torch.empty(1, dtype=torch.int64) for _ in range(count)] for _ in rank.others]
    works = [dist.irecv(t, r) for r, row in zip(rank.others, inbox, strict=True) for t in row]
    for i in range(count):
        works += [dist.isend(torch.tensor([i]), other) for other in rank.others]
    for work in works:
        work.wait()
    assert all([t.item() for t in row] == list(range(count)) for row in inbox)


def check_beside_collectives(rank: Rank) -> None:
    """A receive that waits holds up no collective, and the other way round."""
    tensor, total = torch.empty(10), torch.ones(100_000)
    work = dist.irecv(tensor, 0) if rank.index == 1 else None
    for _ in range(5):
        dist.all_reduce(total)
        total /= rank.size
    if rank.index == 0:
        dist.send(torch.full((10,), 3.0), 1)
    elif work is not None:
        work.wait()
        assert work._source_rank() == 0
        assert tensor.eq(3).all()
    assert total.eq(1).all()


@pytest.mark.parametrize("check", [check_crossing, check_many, check_beside_collectives])
def test_no_message_holds_up_another(ranks: Ranks, check: Any) -> None:
    ranks(check)


def drown(rank: Rank, life: str) -> Outcome:
    """Rank 1 sends more than its peer keeps, and dies."""

    def child() -> Outcome:
        join(rank_of(rank, life), seconds=60)
        piece = torch.zeros(2048)  # 8 KiB: sent at once
        if rank.index == 1:
            works = [dist.isend(piece, 0, tag=7) for _ in range(9000)]
            works[8100].wait()
            os._exit(0)
        begin = time.monotonic()
        text = error_of(lambda: dist.recv(piece, 1, tag=5))[1]
        return {"text": text, "seconds": time.monotonic() - begin}

    return in_child(child)


def test_a_peer_whose_messages_nobody_wants_dies() -> None:
    """64 MiB of them are kept; bytes behind those are no sign of life."""
    with some_ranks(2, backend=None) as two:
        outcome = two(drown, "drown", seconds=120)[0]
    assert "its process died" in outcome["text"], outcome
    assert outcome["seconds"] < limit(30)
