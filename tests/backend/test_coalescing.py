"""Several calls as one: what a batch leaves behind when it raises, and what other threads see."""

from __future__ import annotations

import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import limit
from lab.ranks import Rank, Ranks, error_of, ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as some:
        yield some


def works(rank: Rank) -> str:
    """Say which of the calls that torch can collect does nothing."""
    sum_, all_of_them, mine = torch.ones(1), torch.zeros(rank.size), torch.zeros(1)
    dist.all_reduce(sum_)
    dist.all_gather_into_tensor(all_of_them, torch.ones(1))
    dist.reduce_scatter_tensor(mine, torch.ones(rank.size))
    results = [sum_.tolist(), all_of_them.tolist(), mine.tolist()]
    return "" if results == [[2.0], [1.0, 1.0], [2.0]] else f"{results}"


class StopError(Exception):
    pass


def batch_to_itself(rank: Rank) -> None:
    dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), rank.index)])


def signal_in_a_batch(rank: Rank) -> None:
    class Op(dist.P2POp):
        """A message in whose midst a signal comes, whose handler raises."""

        group_peer = property(lambda self: os.kill(os.getpid(), signal.SIGUSR1), lambda *_: None)

    def stop(*_: Any) -> None:
        raise StopError

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        good = dist.P2POp(dist.isend, torch.ones(1), 1 - rank.index, tag=7)
        dist.batch_isend_irecv([good, Op(dist.isend, torch.ones(1), 1 - rank.index)])
    finally:
        signal.signal(signal.SIGUSR1, before)


def block_that_raises(rank: Rank, **options: Any) -> None:
    with dist._coalescing_manager(**options):
        dist.all_reduce(torch.ones(1))
        raise StopError


def block_on_the_cpu(rank: Rank) -> None:
    block_that_raises(rank, device=torch.device("cpu"))


def block_of_two_kinds(rank: Rank) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(1))
        dist.all_gather_into_tensor(torch.ones(2), torch.ones(1))


RAISES = [
    batch_to_itself,
    signal_in_a_batch,
    block_that_raises,
    block_on_the_cpu,
    block_of_two_kinds,
]


def check_after(rank: Rank, raises: Callable[[Rank], None]) -> tuple[str, str]:
    return error_of(lambda: raises(rank))[0], works(rank)


@pytest.mark.parametrize("raises", RAISES)
def test_calls_work_after_a_batch_that_raised(two: Ranks, raises: Any) -> None:
    for kind, wrong in two(check_after, raises):
        assert kind in ("RuntimeError", "StopError"), "it was to raise"
        assert not wrong, "these calls did nothing, and said nothing"


def check_threads(rank: Rank) -> list[str]:
    """One thread is within a coalescing while another one calls."""
    inside, over = threading.Event(), threading.Event()
    tensor, problems = torch.full((3,), 5.0), []

    def collect() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(tensor)
            inside.set()
            over.wait(limit(20))

    thread = threading.Thread(target=collect)
    thread.start()
    assert inside.wait(limit(20))
    problems.append(works(rank))
    problems.append("" if tensor.eq(5).all() else "the block's own call did not wait for its end")
    over.set()
    thread.join(limit(20))
    problems.append("" if tensor.eq(10).all() else "the block's own call was not made")
    return problems


def test_a_coalescing_is_its_threads_own(two: Ranks) -> None:
    assert two(check_threads) == [["", "", ""]] * 2


def messages(rank: Rank, count: int) -> tuple[list[dist.P2POp], list[torch.Tensor]]:
    peer = 1 - rank.index
    into = [torch.zeros(10) for _ in range(count)]
    ops = [
        dist.P2POp(dist.isend, torch.full((10,), float(tag)), peer, tag=tag) for tag in range(count)
    ]
    return ops + [dist.P2POp(dist.irecv, t, peer, tag=tag) for tag, t in enumerate(into)], into


def check_requests(rank: Rank) -> tuple[int, bool]:
    ops, into = messages(rank, 3)
    requests = dist.batch_isend_irecv(ops)
    for request in requests:
        request.wait()
    return len(requests), all(tensor.eq(tag).all() for tag, tensor in enumerate(into))


def test_each_message_has_a_request(two: Ranks) -> None:
    assert two(check_requests) == [(6, True)] * 2


def send_to(tensor: torch.Tensor, to: int) -> None:
    dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, to)])


def check_memory(rank: Rank) -> list[bool]:
    """Tensors of a refused batch are free again."""
    alive = []
    for _ in range(3):
        tensor = torch.ones(1000)
        alive.append(weakref.ref(tensor))
        error_of(functools.partial(send_to, tensor, rank.index))
        error_of(functools.partial(block_with, tensor))
        del tensor
    dist.barrier()
    return [reference() is None for reference in alive]


def block_with(tensor: torch.Tensor) -> None:
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(tensor)
        raise StopError


def test_a_refused_batch_keeps_nothing(two: Ranks) -> None:
    assert two(check_memory) == [[True] * 3] * 2


def check_on_request(rank: Rank) -> list[Any]:
    """A block that names the CPU: backends that do not batch there may refuse it, and we do not."""
    tensors = [torch.full((4,), rank.index + 1.0) for _ in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, 1, async_op=True)
    manager.wait()
    return [len(manager.works), *(tensor[0].item() for tensor in tensors)]


def test_a_block_that_names_the_cpu(two: Ranks) -> None:
    assert two(check_on_request) == [[3, 2.0, 2.0, 2.0]] * 2


def check_others(rank: Rank) -> list[str]:
    """Groups of other backends work as torch has made them."""
    gloo = dist.new_group(backend="gloo")
    with dist._coalescing_manager(gloo):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=gloo)
    return ["" if tensor.item() == 2 else f"{tensor}", works(rank)]


def test_groups_of_other_backends(two: Ranks) -> None:
    assert two(check_others) == [["", ""]] * 2
