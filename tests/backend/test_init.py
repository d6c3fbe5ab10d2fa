"""How a group comes to be: by every kind of store, with one rank, under TORCH_DISTRIBUTED_DEBUG."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lab.limits import limit
from lab.outcomes import Outcome, check, in_child, outcome_of, rank_of
from lab.ports import free_port
from lab.ranks import HOST, Rank, Ranks, error_of, join, ranks

# ---- stores


class OwnStore(dist.Store):
    """A store written in Python: torch hands on a call back into the interpreter."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def set(self, key: str, value: Any) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        return self.inner.compare_set(key, expected, wanted)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.inner.wait(keys, *timeout)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        return self.inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)


def tcp_store(rank: Rank, port: int, use_libuv: bool) -> Any:
    return dist.TCPStore(HOST, port, rank.size, rank.index == 0, use_libuv=use_libuv)


STORES: dict[str, Callable[[Rank, int, str], Any]] = {
    "tcp": lambda rank, port, path: tcp_store(rank, port, use_libuv=True),
    "tcp without libuv": lambda rank, port, path: tcp_store(rank, port, use_libuv=False),
    "file": lambda rank, port, path: dist.FileStore(path, rank.size),
    "prefix": lambda rank, port, path: dist.PrefixStore("a", dist.PrefixStore("b", rank.store)),
    "own": lambda rank, port, path: OwnStore(dist.PrefixStore("own", rank.store)),
}


def work(rank: Rank) -> None:
    """Use a group, and one made within it, then end both."""
    tensor = torch.ones(5000)
    dist.all_reduce(tensor)
    assert tensor.eq(rank.size).all()
    group = dist.new_group([0, 2])
    if rank.index != 1:
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(2 * rank.size).all()
    dist.barrier()
    dist.destroy_process_group()


def meet_by_store(rank: Rank, backend: str, kind: str, port: int, path: str) -> None:
    store = STORES[kind](rank, port, path)
    join(Rank(rank.index, rank.size, store), backend, seconds=20)
    work(rank)


def meet_by_url(rank: Rank, backend: str, url: str) -> None:
    dist.init_process_group(
        backend, url, timedelta(seconds=20), world_size=rank.size, rank=rank.index
    )
    work(rank)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("backend", ["ringcomm", "gloo"])
def test_stores(three: Ranks, tmp_path: Path, backend: str, kind: str) -> None:
    three(meet_by_store, backend, kind, free_port(), str(tmp_path / "store"))


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_urls(three: Ranks, tmp_path: Path, scheme: str) -> None:
    where = f"{HOST}:{free_port()}" if scheme == "tcp" else tmp_path / "store"
    three(meet_by_url, "ringcomm", f"{scheme}://{where}")


# ---- a rank that dies on the way


class DeadlyStore(OwnStore):
    """Kills the process that is about to write a key of this kind, or has just added to one."""

    def __init__(self, inner: Any, kind: str) -> None:
        super().__init__(inner)
        self.kind = kind

    def set(self, key: str, value: Any) -> None:
        if f"/{self.kind}/" in key:
            os.kill(os.getpid(), signal.SIGKILL)
        super().set(key, value)

    def add(self, key: str, value: int) -> int:
        added = super().add(key, value)
        if value and key.endswith(self.kind):
            os.kill(os.getpid(), signal.SIGKILL)
        return added


def die_before(rank: Rank, victim: int, kind: str) -> Outcome:
    def body() -> Outcome:
        os.environ["RINGCOMM_TRANSPORT"] = "tcp"  # more steps than on one host
        store: Any = dist.PrefixStore(f"{kind}{victim}", rank.store)
        if rank.index == victim:
            store = DeadlyStore(store, kind)
        return outcome_of(lambda: join(Rank(rank.index, rank.size, store), seconds=4))

    return in_child(body)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("kind", ["card", "contact", "ready"])
def test_a_rank_that_dies_while_it_joins_is_named(three: Ranks, victim: int, kind: str) -> None:
    outcomes = three(die_before, victim, kind)
    assert outcomes.pop(victim) == {"killed": signal.SIGKILL}
    for outcome in outcomes:
        check(outcome, f"waiting for rank {victim} of 3, which has not ", within=limit(5))


def live_twice(rank: Rank, victims: list[int]) -> Outcome:
    """The store lives on, and has the cards of some ranks that were killed when they came."""
    kept: Any = dist.PrefixStore(f"lives{victims}", rank.store)

    def die() -> Outcome:
        store = DeadlyStore(kept, "card/said")
        return outcome_of(lambda: join(Rank(rank.index, rank.size, store), seconds=20))

    def work_again() -> Outcome:
        join(Rank(rank.index, rank.size, kept), seconds=20)
        work(rank)
        return {"worked": True}

    if rank.index in victims:
        assert in_child(die) == {"killed": signal.SIGKILL}
        kept.add("dead", 1)
    while kept.add("dead", 0) < len(victims):
        time.sleep(0.01)
    return in_child(work_again)


@pytest.mark.parametrize("victims", [[0], [1], [0, 2], [0, 1, 2]])
def test_the_words_of_the_dead_in_a_store_that_lives_on(three: Ranks, victims: list[int]) -> None:
    assert three(live_twice, victims) == [{"worked": True}] * 3


def come_from_another_launcher(rank: Rank, odd: int) -> Outcome:
    def body() -> Outcome:
        if rank.index == odd:
            os.environ |= {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"}
        join(rank_of(rank, f"launcher{odd}"), seconds=20)
        work(rank)
        return {"worked": True}

    return in_child(body)


@pytest.mark.parametrize("odd", [0, 1])
def test_launchers_may_differ(three: Ranks, odd: int) -> None:
    assert three(come_from_another_launcher, odd) == [{"worked": True}] * 3


# ---- who is there


def be_twice(rank: Rank) -> Outcome:
    def body() -> Outcome:
        here = rank_of(rank, "twice")
        number = min(rank.index, 1)
        return outcome_of(lambda: join(Rank(number, 3, here.store), seconds=30)) | {
            "process": os.getpid()
        }

    return in_child(body)


def test_two_processes_of_one_rank_are_named(three: Ranks) -> None:
    outcomes = three(be_twice)
    pids = [outcome["process"] for outcome in outcomes[1:]]
    for outcome in outcomes:
        check(outcome, "two processes are rank 1 of 3: process ", within=limit(10))
        for pid in pids:
            assert f"process {pid} on " in outcome["text"]


ORDERS: dict[str, list[list[list[int]]]] = {  # what each rank makes
    "skipped": [[[0, 1], [0, 2]], [[0, 1], [0, 2]], [[0, 2]]],
    "another order": [[[0, 1], [0, 2]], [[0, 1], [0, 2]], [[0, 2], [0, 1]]],
}


def make_groups(rank: Rank, how: str, late: int) -> Outcome:
    def body() -> Outcome:
        here = rank_of(rank, f"{how}{late}")
        join(here, seconds=4)
        sums, errors = [], []
        if rank.index == late:
            here.store.wait(["others"])
        for number, members in enumerate(ORDERS[how][rank.index]):
            try:
                group = dist.new_group(members, timeout=timedelta(seconds=4))
                if rank.index in members:
                    part = torch.tensor([10.0**rank.index])
                    dist.all_reduce(part, group=group)
                    sums.append(part.item() == sum(10.0**member for member in members))
            except dist.DistBackendError as error:
                errors.append(str(error))
                break
            finally:
                if number == 0 and rank.index == 1 and late == 2:
                    here.store.set("others", "")
        if rank.index == 2:
            here.store.set("others", "")
        return {"sums": sums, "errors": errors}

    return in_child(body)


@pytest.mark.parametrize("how", ORDERS)
def test_groups_of_one_name_and_other_members_never_meet(three: Ranks, how: str) -> None:
    outcomes = three(make_groups, how, 2)
    assert all(all(outcome["sums"]) for outcome in outcomes), outcomes
    (text,) = outcomes[2]["errors"]
    assert "makes group '1' of the ranks [0, 1], and this one, rank 2, of the ranks [0, 2]" in text
    (text,) = outcomes[0]["errors"]
    assert "waiting for rank 1 of 2, which has not joined the group of the ranks [0, 2]" in text


def come_late(rank: Rank) -> None:
    join(rank_of(rank, "late"), seconds=20)
    if rank.index == 1:
        time.sleep(1.5)  # longer than the limit of the group's calls
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    group.set_timeout(timedelta(seconds=20))  # on a busy machine, one may call late as well
    part = torch.ones(3)
    dist.all_reduce(part, group=group)
    assert part.eq(rank.size).all()
    dist.destroy_process_group()


def test_a_meeting_lasts_as_long_as_the_default_group_waits(three: Ranks) -> None:
    three(come_late)


def serve_and_go(rank: Rank, port: int) -> Outcome:
    def body() -> Outcome:
        store = tcp_store(rank, port, use_libuv=True)
        join(Rank(rank.index, rank.size, store), seconds=20)
        if rank.index == 1:
            time.sleep(0.5)  # so long pauses between questions have grown
        group = dist.new_group()
        if rank.index == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"rank": dist.get_rank(group)}

    return in_child(body)


def test_the_rank_that_serves_the_store_may_leave(three: Ranks) -> None:
    outcomes = three(serve_and_go, free_port())
    assert outcomes == [{"killed": signal.SIGKILL}, {"rank": 1}, {"rank": 2}]


# ---- one rank


def be_alone(rank: Rank) -> None:
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.name() == "custom"
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == c10d.default_pg_timeout
    tensor, out = torch.arange(4.0).view(2, 2), torch.zeros(2, 2)
    calls: list[Callable[[], Any]] = [
        lambda: dist.broadcast(tensor, 0),
        lambda: dist.all_reduce(tensor),
        lambda: dist.reduce(tensor, 0),
        lambda: dist.all_reduce_coalesced([tensor]),
        lambda: dist.barrier(),
        lambda: dist.all_gather([out], tensor),
        lambda: dist.gather(tensor, [out]),
        lambda: dist.scatter(out, [tensor]),
        lambda: dist.reduce_scatter(out, [tensor]),
        lambda: dist.all_to_all([out], [tensor]),
        lambda: dist.all_to_all_single(out, tensor),
        lambda: dist.all_gather_into_tensor(out, tensor),
        lambda: dist.reduce_scatter_tensor(out, tensor),
    ]
    for number, call in enumerate(calls):
        out.zero_()
        call()
        assert tensor.flatten().tolist() == [0, 1, 2, 3]
        assert number < 5 or out.equal(tensor), number
    dist.all_to_all_single(out, tensor.t())  # refused by Gloo
    assert out.equal(tensor.t())
    dist.destroy_process_group()


def test_alone() -> None:
    with ranks(1, backend=None) as single:
        single(be_alone)


# ---- TORCH_DISTRIBUTED_DEBUG=DETAIL: every call is compared by way of Gloo before it is made


def differ(rank: Rank, backend: str, how: str) -> tuple[str, str]:
    """Rank 1 does something else than the others, in a group that is the third of its kind."""
    join(Rank(rank.index, rank.size, dist.PrefixStore(backend + how, rank.store)), backend, 20)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    groups = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(3)]
    dist.set_debug_level(dist.DebugLevel.OFF)
    group, odd, data = groups[2], rank.index == 1, torch.ones(4)
    wrapper = group._get_backend(torch.device("cpu"))
    assert type(wrapper) is c10d._ProcessGroupWrapper
    assert wrapper.wrapped_pg.name() == backend
    before = wrapper._get_sequence_number_for_group()
    dist.all_reduce(data, group=group)
    assert data.eq(rank.size).all()
    assert wrapper._get_sequence_number_for_group() == before + 1
    calls: dict[str, Callable[[], Any]] = {
        "call": lambda: (dist.broadcast if odd else dist.reduce)(data, 0, group=group),
        "shape": lambda: dist.all_reduce(torch.ones(5 if odd else 4), group=group),
        "dtype": lambda: dist.all_reduce(data.double() if odd else data, group=group),
        "barrier": lambda: dist.barrier(group) if odd else dist.all_reduce(data, group=group),
    }
    error = error_of(calls[how])
    dist.all_reduce(data)  # the default group is as it was
    dist.destroy_process_group()
    return error


DIFFERENCES = {
    "call": ["OpType=REDUCE", "OpType=BROADCAST"],
    "shape": ["OpType=ALLREDUCE, TensorShape=[4]", "OpType=ALLREDUCE, TensorShape=[5]"],
    "dtype": ["TensorDtypes=Float", "TensorDtypes=Double"],
    "barrier": ["OpType="],  # torch reads a call without tensors wrongly; on Gloo too
}


@pytest.mark.parametrize("how", DIFFERENCES)
def test_detail_names_both_calls(three: Ranks, how: str) -> None:
    ours, gloo = (three(differ, backend, how) for backend in ("ringcomm", "gloo"))
    for index, (kind, text) in enumerate(ours):
        assert kind == "RuntimeError"
        assert "Detected mismatch between collectives on ranks" in text
        if index < 2:  # rank 2 is compared with one of them only
            for word in DIFFERENCES[how]:
                assert word in text
        assert text.splitlines()[0] == gloo[index][1].splitlines()[0]
