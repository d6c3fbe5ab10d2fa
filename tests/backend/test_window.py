"""torch's one-sided windows, from 2.14 on. tests/cpp/comm/window_test.cc has the puts' model."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms

import ringcomm
from lab.groups import choose, die, survivors
from lab.limits import seed
from lab.ranks import Rank, Ranks, error_of, join

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_new_window"), reason="torch has no windows before 2.14"
)
MAKERS: dict[str, Callable[..., torch.Tensor]] = {"own": torch.zeros, "readable": ringcomm.empty}
EVERY = [f"{transport}/{kind}" for transport in ("shm", "tcp") for kind in MAKERS]


def new_window(tensor: torch.Tensor | None = None) -> Any:
    return dist._new_window(tensor)


def tensor_of(kind: str, *sizes: int, **options: Any) -> torch.Tensor:
    return MAKERS[kind](*sizes, **options).zero_()


def ring(rank: Rank, kind: str) -> None:
    """Each puts its part into all others', for several types, in both orders of registration."""
    assert dist._supports_window()
    for dtype in (torch.float32, torch.int8, torch.complex64, torch.bool):
        tensor = tensor_of(kind, rank.size, 5, dtype=dtype)
        window = new_window() if dtype == torch.int8 else new_window(tensor)
        if dtype == torch.int8:
            window.tensor_register(tensor)
        mine = torch.full((5,), rank.index + 1).to(dtype)
        works = [window.put(mine, peer, 5 * rank.index, True) for peer in range(rank.size)]
        works += [window.signal(peer, True) for peer in range(rank.size)]
        for peer in range(rank.size):
            window.wait_signal(peer, False)
        for work in works:
            work.wait()
            assert work.is_completed()
        wanted = torch.arange(1, rank.size + 1).to(dtype).unsqueeze(1).expand(-1, 5)
        assert tensor.equal(wanted)
        window.tensor_deregister()
        assert "no tensor" in error_of(partial(window.signal, 0, False))[1]


def signals_are_counted(rank: Rank, kind: str) -> None:
    window = new_window(tensor_of(kind, 4))
    peer = (rank.index + 1) % rank.size
    for _ in range(100):
        window.signal(peer, False)
    before = (rank.index - 1) % rank.size
    for _ in range(99):
        window.wait_signal(before, False)
    last = window.wait_signal(before, True)
    last.wait()
    late = window.wait_signal(before, True)
    dist.barrier()
    assert not late.is_completed(), "a hundred signals end a hundred waits"
    dist.barrier()
    window.signal(peer, False)
    late.wait()
    window.tensor_deregister()


def large_puts(rank: Rank, kind: str) -> None:
    """Far more than any buffer holds, both ways at once, and windows that are used in turn."""
    count, peer = 2_000_000, (rank.index + 1) % rank.size
    tensors = [tensor_of(kind, count) for _ in range(2)]
    windows = [new_window(tensor) for tensor in tensors]
    source = torch.arange(count, dtype=torch.float32)
    for turn in range(6):
        window, tensor = windows[turn % 2], tensors[turn % 2]
        window.put(source + turn + rank.index, peer, 0, False)
        window.signal(peer, False)
        before = (rank.index - 1) % rank.size
        window.wait_signal(before, False)
        assert tensor.equal(source + turn + before)
    for window in windows:
        window.tensor_deregister()


def views(rank: Rank, kind: str) -> list[str]:
    """A peer's tensor is seen where it lies, and stays while somebody sees it."""
    tensor = tensor_of(kind, 3, 2)
    window = new_window(tensor)
    assert window.map_remote_tensor(rank.index).data_ptr() == tensor.data_ptr()
    peer = (rank.index + 1) % rank.size
    attributes = [str(window.get_attr(r).access_type).rpartition(".")[2] for r in range(rank.size)]
    if attributes[peer] == "UNIFIED":
        view = window.map_remote_tensor(peer)
        assert view.shape == (3, 2)
        view[2, 1] = 5.0 + rank.index
        dist.barrier()
        assert tensor[2, 1] == 5.0 + (rank.index - 1) % rank.size
        del window
        gc.collect()
        assert view[2, 1] == 5.0 + rank.index
    else:
        text = error_of(lambda: window.map_remote_tensor(peer))[1]
        assert f"rank {peer}'s tensor is not mapped here" in text
    dist.barrier()
    return attributes


def errors(rank: Rank, kind: str) -> None:
    window = new_window()
    tensor = tensor_of(kind, 10)
    peer = 1 - rank.index
    told = [
        (lambda: window.put(tensor, peer, 0, False), "put: no tensor is registered"),
        (lambda: window.tensor_deregister(), "it has no tensor"),
        (lambda: window.tensor_register(torch.zeros(4, 4).t()), "contiguous tensor on the CPU"),
        (lambda: window.tensor_register(torch.zeros(4, device="meta")), "tensor on the CPU"),
    ]
    for call, words in told:
        assert words in error_of(call)[1]
    window.tensor_register(tensor)
    bad = [
        (lambda: window.tensor_register(tensor), "RuntimeError", "has a tensor already"),
        (lambda: window.put(tensor, 2, 0, False), "IndexError", "the group of 2 has no rank 2"),
        (lambda: window.put(tensor, peer, 1, False), "IndexError", f"window of rank {peer} has 10"),
        (lambda: window.put(tensor, peer, -1, False), "IndexError", "10 elements at -1"),
        (lambda: window.put(tensor.double(), peer, 0, False), "TypeError", "put of Double into"),
        (lambda: window.put(tensor[::2], peer, 0, False), "RuntimeError", "contiguous"),
        (lambda: window.wait_signal(rank.index, False), "RuntimeError", "its own signal"),
    ]
    for call, kind_of_error, words in bad:
        name, text = error_of(call)
        assert (name, words in text) == (kind_of_error, True), text
    window.put(tensor[:0], peer, 10, False)
    window.tensor_deregister()
    dist.barrier()  # the group goes on


def deregister_waits(rank: Rank, kind: str) -> None:
    """No signal has told of these puts, and yet all are there once the window is deregistered."""
    chance = random.Random(seed() + rank.index)
    for turn in range(20):
        tensor = tensor_of(kind, rank.size, 100_000)
        window = new_window(tensor)
        for peer in chance.sample(range(rank.size), rank.size):
            parts = torch.full((100_000,), turn + rank.index + 1.0).chunk(chance.randrange(1, 9))
            at = 100_000 * rank.index
            for part in parts:
                window.put(part, peer, at, True)
                at += part.numel()
        window.tensor_deregister()
        wanted = torch.arange(1, rank.size + 1) + float(turn)
        assert tensor.equal(wanted.unsqueeze(1).expand(-1, 100_000))


TASKS = [ring, signals_are_counted, large_puts, deregister_waits]


def in_turn(rank: Rank, kind: str) -> None:
    for task in TASKS:
        task(rank, kind)


def run_ranks(size: int, way: str, task: Callable[..., Any]) -> list[Any]:
    transport, kind = way.split("/")
    some = Ranks(size, None)
    try:
        some(enter, transport)
        results = some(task, kind)
        some.leave()
        return results
    finally:
        some.kill()


def enter(rank: Rank, transport: str) -> None:
    choose("tcp" if transport == "tcp" else "")
    join(rank)


@pytest.mark.parametrize("size", forms([2, 3], 3))
@pytest.mark.parametrize("way", EVERY)
def test_puts_and_signals(way: str, size: int) -> None:
    run_ranks(size, way, in_turn)


@pytest.mark.parametrize("way", EVERY)
def test_errors_leave_the_group_alone(way: str) -> None:
    run_ranks(2, way, errors)


@pytest.mark.parametrize("way", EVERY)
def test_what_is_mapped_can_be_seen(way: str) -> None:
    attributes = run_ranks(2, way, views)
    seen = "UNIFIED" if way == "shm/readable" else "SEPARATE"
    assert attributes == [["UNIFIED", seen], [seen, "UNIFIED"]]


def in_a_child(rank: Rank, kind: str) -> None:
    """A forked child is told that the window is its parent's, and ends without harm."""
    window = new_window(tensor_of(kind, 4))
    dist.barrier()
    child = os.fork()
    if child == 0:
        words = "belongs to the process that forked this one"
        calls = [
            lambda: window.put(torch.zeros(4), 1 - rank.index, 0, False),
            lambda: window.map_remote_tensor(1 - rank.index),
        ]
        told = [words in error_of(call)[1] for call in calls]
        del window
        gc.collect()
        os._exit(0 if all(told) else 1)
    assert os.waitpid(child, 0)[1] == 0
    window.tensor_deregister()


@pytest.mark.parametrize("way", EVERY)
def test_a_forked_child_has_no_window(way: str) -> None:
    run_ranks(2, way, in_a_child)


def dies(rank: Rank, way: str) -> str:
    transport, kind = way.split("/")
    enter(rank, transport)
    window = new_window(tensor_of(kind, 4))
    dist.barrier()
    if rank.index == 1:
        die()
    return error_of(lambda: window.wait_signal(1, False))[1]


@pytest.mark.parametrize("way", EVERY)
def test_a_death_is_named(way: str) -> None:
    for text in survivors(dies, way):
        assert "wait_signal of window 0 from rank 1: " in text
        assert "rank 1" in text.partition(": ")[2]
