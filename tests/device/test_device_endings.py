"""How groups on devices end: a rank leaves, dies or aborts, with streams that are behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import limit
from lab.outcomes import Outcome, rank_of
from lab.ranks import Rank, Ranks, error_of, ranks
from lab.simulated_device import SLOW, SMALL, Cuda, met, on_device


def depart(rank: Rank, life: str, case: str, settings: dict[str, str]) -> Outcome:
    """Rank 0 is fast: it has its result, and aborts, while rank 1's stream has not come so far."""

    def body(rank: Rank) -> str:
        cuda, store = met(), rank_of(rank, life).store
        memory, tensor = cuda.full(1000, rank.index + 1.0)
        late = cuda.full(1000, 1.0)[1]
        if case == "message":
            if rank.index == 0:
                dist.isend(tensor, 1).wait()
            else:
                work = dist.irecv(tensor, 0)
        else:
            work = dist.all_reduce(tensor, async_op=True)
        if rank.index == 0:
            if case != "message":
                work.wait()
            cuda.synchronize()
            dist.distributed_c10d._get_default_group()._get_backend(tensor.device).abort()
            store.set("gone", "")
            store.wait(["over"], timedelta(seconds=20))
            return ""
        store.wait(["gone"], timedelta(seconds=20))
        if work.is_completed():
            return "it is over already: this test shows nothing"
        text = ""
        if case == "queued":  # asked for while the good one is under way
            text = error_of(lambda: dist.all_reduce(late, async_op=True).wait())[1]
        work.wait()
        cuda.synchronize()
        want = 1 if case == "message" else 3
        good = bool(memory.eq(want).all()) and work.exception() is None
        begin = time.monotonic()
        while not text and time.monotonic() - begin < 10:
            text = error_of(lambda: dist.all_reduce(late, async_op=True).wait())[1]
            cuda.synchronize()
        store.set("over", "")
        if "rank 0 failed: abort() was called" not in text:
            return f"no word of rank 0: {text}"
        return "" if good else f"{work.exception()} {memory[:3]}"

    return on_device(rank, life, settings, body)


@pytest.mark.parametrize("case", ["operation", "queued", "message"])
@pytest.mark.parametrize("way", ["auto", "host"])
def test_a_rank_that_has_finished_may_go(two: Ranks, case: str, way: str) -> None:
    settings = {**SMALL, "RINGCOMM_SIM_SLOW_US": "0,20000", "RINGCOMM_CUDA_MODE": way}
    outcomes = two(depart, f"depart {case} {way}", case, settings)
    assert [outcome.get("answer") for outcome in outcomes] == ["", ""], outcomes


def outlive(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """Rank 2 dies; behind an operation that lacks it, the others exchange messages."""

    def body(rank: Rank) -> str:
        cuda = met()
        dist.barrier()
        if rank.index == 2:
            os._exit(0)
        tensor, sent, received = (cuda.full(1000, 1.0)[1] for _ in range(3))
        peer = 1 - rank.index

        def reduce() -> None:  # fails at the call, or at wait(): the death is noticed at any time
            dist.all_reduce(tensor, async_op=True).wait()

        def exchange() -> None:
            for work in [dist.isend(sent, peer), dist.irecv(received, peer)]:
                work.wait()

        texts = [error_of(reduce)[1], error_of(exchange)[1]]
        begin = time.monotonic()
        cuda.synchronize()
        if time.monotonic() - begin > limit(2):
            return "the stream waited on"
        end = time.monotonic() + limit(5)
        while not any(texts) and time.monotonic() < end:
            texts.append(error_of(reduce)[1])
        wrong = [text for text in texts if text and "rank 2" not in text]
        return f"{texts}" if wrong or not any(texts) else ""

    return on_device(rank, life, settings, body)


@pytest.mark.parametrize("way", ["auto", "host"])
def test_messages_behind_an_operation_that_lacks_a_dead_rank(way: str) -> None:
    settings = {**SLOW, "RINGCOMM_CUDA_MODE": way}
    with ranks(3, backend=None) as three:
        outcomes = three(outlive, f"outlive {way}", settings)
    assert [outcome.get("answer") for outcome in outcomes[:2]] == ["", ""], outcomes


def batch(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """One message of a batch comes from a rank that dies; the other one ends well."""

    def body(rank: Rank) -> str:
        cuda = met()
        dist.barrier()
        if rank.index == 2:
            os._exit(0)
        sent, received = (cuda.full(1000, 1.0)[1] for _ in range(2))
        if rank.index == 1:
            return "" if error_of(lambda: dist.recv(received, 0))[1] == "" else "the good one"
        messages = [dist.P2POp(dist.isend, sent, 1), dist.P2POp(dist.irecv, received, 2)]
        works: list[dist.Work] = []
        texts = [error_of(lambda: works.extend(dist.batch_isend_irecv(messages)))[1]]
        texts += [error_of(work.wait)[1] for work in works]
        cuda.synchronize()
        end = time.monotonic() + limit(10)
        while not all(work.is_completed() for work in works) and time.monotonic() < end:
            time.sleep(0.01)
        good = not any(texts) and all(work.is_success() for work in works)
        return "a message that never came is called a success" if good else ""

    return on_device(rank, life, settings, body)


@pytest.mark.parametrize("way", ["auto", "host"])
def test_a_batch_is_good_when_all_of_it_is(way: str) -> None:
    with ranks(3, backend=None) as three:
        outcomes = three(batch, f"batch {way}", {**SMALL, "RINGCOMM_CUDA_MODE": way})
    assert outcomes[0].get("answer") == "", outcomes


def refused(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """A batch raises in its midst, while another thread is within one of its own."""

    def body(rank: Rank) -> str:
        cuda, peer = met(), 1 - rank.index
        sent, (memory, received) = cuda.full(1000, rank.index + 1.0)[1], cuda.full(1000, 0.0)
        inside, over = threading.Event(), threading.Event()

        def collect() -> None:
            with dist._coalescing_manager(device=sent.device):
                inside.set()
                over.wait(limit(20))

        thread = threading.Thread(target=collect)
        thread.start()
        inside.wait(limit(20))
        messages = [dist.P2POp(dist.isend, sent, to) for to in (peer, rank.index)]
        text = error_of(lambda: dist.batch_isend_irecv(messages))[1]
        if "cannot be its own peer" not in text:
            return f"this was to be refused: {text}"
        for sends in (True, False) if rank.index == 0 else (False, True):
            (dist.isend(sent, peer) if sends else dist.irecv(received, peer)).wait()
        dist.all_reduce(sent)
        cuda.synchronize()
        over.set()
        thread.join(limit(20))
        return "" if memory.eq(peer + 1.0).all() and sent.eq(3).all() else "a call did nothing"

    return on_device(rank, life, settings, body)


def test_a_batch_that_raised_leaves_nothing(two: Ranks) -> None:
    outcomes = two(refused, "refused", SMALL)
    assert [outcome.get("answer") for outcome in outcomes] == ["", ""], outcomes


def close(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """Threads enqueue while the group is destroyed: some of them wait for one that does."""

    def body(rank: Rank) -> str:
        cuda = Cuda()
        tensor = cuda.full(1000, 1.0)[1]
        for _ in range(5):
            group = dist.new_group()
            dist.all_reduce(tensor, group=group)
            backend = group._get_backend(torch.device("cuda"))
            threads = [threading.Thread(target=repeat, args=(group, tensor)) for _ in range(6)]
            for thread in threads:
                thread.start()
            time.sleep(0.02)
            backend.shutdown()
            for thread in threads:
                thread.join(limit(10))
            if any(thread.is_alive() for thread in threads):
                return "a thread hangs"
        return ""

    def repeat(group: Any, tensor: torch.Tensor) -> None:
        with contextlib.suppress(Exception):
            while True:
                dist.all_reduce(tensor, group=group)

    return on_device(rank, life, settings, body)


def test_threads_enqueue_while_the_group_is_destroyed(two: Ranks) -> None:
    outcomes = two(close, "close", SMALL)
    assert [outcome.get("answer") for outcome in outcomes] == ["", ""], outcomes


def idle(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """The group has failed, and its streams take their time: nobody spins, and waits end."""

    def body(rank: Rank) -> str:
        cuda = met()
        tensor = cuda.full(1000, 1.0)[1]
        if rank.index == 1:
            error_of(lambda: dist.all_reduce(tensor, async_op=True))
            return ""
        work = dist.all_reduce(tensor, async_op=True)
        dist.distributed_c10d._get_default_group().abort()
        began, used = time.monotonic(), time.process_time()
        time.sleep(1)
        busy = (time.process_time() - used) / (time.monotonic() - began)
        if work.is_completed():
            return "it is over already: this test shows nothing"
        return f"{busy:.0%} of a core" if busy > 0.5 else ""

    return on_device(rank, life, settings, body)


def test_a_group_that_has_failed_uses_no_processor(two: Ranks) -> None:
    outcomes = two(idle, "idle", {**SMALL, "RINGCOMM_SIM_SLOW_US": "300000"})
    assert [outcome.get("answer") for outcome in outcomes] == ["", ""], outcomes


def stuck(rank: Rank, life: str, settings: dict[str, str]) -> Outcome:
    """The group fails while the host waits for a stream that takes its time."""

    def body(rank: Rank) -> str:
        cuda = met()
        tensor = cuda.full(1000, 1.0)[1]
        if rank.index == 1:
            error_of(lambda: dist.all_reduce(tensor, async_op=True))
            return ""
        group = dist.distributed_c10d._get_default_group()
        work = dist.all_reduce(tensor, async_op=True)
        threading.Timer(0.2, group.abort).start()
        text = error_of(lambda: work.wait(timedelta(seconds=60)))[1]
        if work.is_completed():
            return "the stream has ended: this test shows nothing"
        return "" if "abort() was called" in text else f"no word of the failure: {text}"

    return on_device(rank, life, settings, body)


def test_a_wait_ends_with_the_group_and_not_with_the_stream(two: Ranks) -> None:
    outcomes = two(stuck, "stuck", {**SMALL, "RINGCOMM_SIM_SLOW_US": "500000"})
    assert [outcome.get("answer") for outcome in outcomes] == ["", ""], outcomes
