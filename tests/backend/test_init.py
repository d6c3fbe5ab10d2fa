"""How a group comes to be: by every kind of store, with one rank, under TORCH_DISTRIBUTED_DEBUG."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lab.outcomes import Outcome, check, in_child, outcome_of
from lab.ports import free_port
from lab.ranks import HOST, Rank, Ranks, error_of, join, ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with ranks(3, backend=None) as some:
        yield some


# ---- stores


class OwnStore(dist.Store):
    """A store written in Python: what torch hands on is then a call back into the interpreter."""

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
    """Kills the process that is about to write a key of this kind."""

    def __init__(self, inner: Any, kind: str) -> None:
        super().__init__(inner)
        self.kind = kind

    def set(self, key: str, value: Any) -> None:
        if f"/{self.kind}/" in key:
            os.kill(os.getpid(), signal.SIGKILL)
        super().set(key, value)


def die_before(rank: Rank, victim: int, kind: str) -> Outcome:
    def body() -> Outcome:
        os.environ["RINGCOMM_TRANSPORT"] = "tcp"  # more steps than on one host
        store: Any = dist.PrefixStore(f"{kind}{victim}", rank.store)
        if rank.index == victim:
            store = DeadlyStore(store, kind)
        return outcome_of(lambda: join(Rank(rank.index, rank.size, store), seconds=1))

    return in_child(body)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("kind", ["card", "contact", "ready"])
def test_a_rank_that_dies_while_it_joins_is_named(three: Ranks, victim: int, kind: str) -> None:
    outcomes = three(die_before, victim, kind)
    assert outcomes.pop(victim) == {"killed": signal.SIGKILL}
    for outcome in outcomes:
        check(outcome, f"waiting for rank {victim} of 3, which has not ", within=3)


# ---- one rank


def be_alone(rank: Rank) -> None:
    dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD.name() == "custom"
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == c10d.default_pg_timeout
    one, out = torch.arange(4.0).view(2, 2), torch.zeros(2, 2)
    calls: list[Callable[[], Any]] = [
        lambda: dist.broadcast(one, 0),
        lambda: dist.all_reduce(one),
        lambda: dist.reduce(one, 0),
        lambda: dist.all_reduce_coalesced([one]),
        lambda: dist.barrier(),
        lambda: dist.all_gather([out], one),
        lambda: dist.gather(one, [out]),
        lambda: dist.scatter(out, [one]),
        lambda: dist.reduce_scatter(out, [one]),
        lambda: dist.all_to_all([out], [one]),
        lambda: dist.all_to_all_single(out, one),
        lambda: dist.all_gather_into_tensor(out, one),
        lambda: dist.reduce_scatter_tensor(out, one),
    ]
    for number, call in enumerate(calls):
        out.zero_()
        call()
        assert one.flatten().tolist() == [0, 1, 2, 3]
        assert number < 5 or out.equal(one), number
    dist.all_to_all_single(out, one.t())  # refused by Gloo
    assert out.equal(one.t())
    dist.destroy_process_group()


def test_alone() -> None:
    with ranks(1, backend=None) as one:
        one(be_alone)


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
    found = error_of(calls[how])
    dist.all_reduce(data)  # the default group is as it was
    dist.destroy_process_group()
    return found


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
