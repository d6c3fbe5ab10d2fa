"""Groups that get other ranks in place: without a store, and also when they have failed."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms

from lab.groups import DIES, TRANSPORTS, change, die, gather, meet, survivors, total, unconnected
from lab.limits import claim, limit
from lab.ranks import Rank, Ranks, error_of, join, ranks

NATIVE = hasattr(dist, "_reconfigure")  # torch 2.14
ROUNDS = 200
TYPICAL = 0.010  # seconds, of a change between 3 processes
FILES, THREADS = Path("/proc/self/fd"), Path("/proc/self/task")


def change_often(rank: Rank, transport: str) -> list[Any]:
    backend = unconnected(rank, transport)
    outcomes: list[Any] = [error_of(lambda: total(backend)), backend.get_error().name]
    mine = backend._reconfigure_handle()
    all_of_them = gather(rank, "handles", mine)
    orders = [[0, 1, 2], [2, 0, 1], [0, 2], [1], [1, 2, 0], [2, 1]]
    for uuid, order in enumerate(orders):
        if rank.index in order:
            change(backend, uuid, [all_of_them[index] for index in order])
            outcomes.append((backend.rank(), backend.size(), total(backend)))
        meet(rank, f"round {uuid}")
    assert backend._reconfigure_handle() == mine
    return outcomes


@pytest.mark.parametrize("transport", forms(TRANSPORTS, ""))
def test_ranks_come_and_go(transport: str) -> None:
    some = Ranks(3, None)
    try:
        outcomes = some(change_often, transport)
    finally:
        some.kill()
    for (kind, text), error, *_ in outcomes:
        assert kind == "DistBackendError"
        assert "is not connected (reconfigure it): no reconfigure() has been called" in text
        assert error == "SUCCESS"
    assert outcomes[0][2:] == [(0, 3, 6), (1, 3, 6), (0, 2, 3), (2, 3, 6)]
    assert outcomes[1][2:] == [(1, 3, 6), (2, 3, 6), (0, 1, 1), (0, 3, 6), (1, 2, 3)]
    assert outcomes[2][2:] == [(2, 3, 6), (0, 3, 6), (1, 2, 3), (1, 3, 6), (0, 2, 3)]


def lose_one(rank: Rank, transport: str) -> tuple[str, float, float, str]:
    backend = unconnected(rank, transport)
    handles = gather(rank, "handles", backend._reconfigure_handle())
    change(backend, 1, handles)
    if rank.index == DIES:
        die()
    _, text = error_of(lambda: total(backend))
    begin = time.monotonic()
    _, late = error_of(lambda: change(backend, 2, handles))
    noticed = time.monotonic() - begin
    change(backend, 3, [handles[0], handles[2]])
    assert backend.get_error().name == "SUCCESS"
    return text, noticed, total(backend), late


@pytest.mark.parametrize("transport", forms(TRANSPORTS, ""))
def test_a_group_whose_rank_died_lives_again(transport: str) -> None:
    for text, noticed, sum_of_two, late in survivors(lose_one, transport):
        assert "1" in text
        assert "1" in late
        assert "Timed out" not in late
        assert noticed < claim(2)
        assert sum_of_two == 3


def call_late(rank: Rank, transport: str) -> tuple[str, float]:
    backend = unconnected(rank, transport)
    handles = gather(rank, "handles", backend._reconfigure_handle())
    change(backend, 1, handles)
    if rank.index == DIES:
        die()
    error_of(lambda: total(backend))
    if rank.index == 2:
        rank.store.get("left")
    _, text = error_of(lambda: change(backend, 2, handles, limit(3)))
    rank.store.set("left", "")
    change(backend, 3, [handles[0], handles[2]])
    return text, total(backend)


@pytest.mark.parametrize("transport", forms(TRANSPORTS, ""))
def test_a_rank_that_calls_when_rank_0_has_left_learns_who_died(transport: str) -> None:
    for text, sum_of_two in survivors(call_late, transport):
        assert text.startswith("rank 1")
        assert sum_of_two == 3


def stop_in_the_middle(rank: Rank) -> list[Any]:
    backend = unconnected(rank)
    handles = gather(rank, "handles", backend._reconfigure_handle())
    change(backend, 1, handles)
    outcomes: list[Any] = []
    if rank.index == 0:  # nobody else comes
        threading.Timer(0.2, backend.abort).start()
        begin = time.monotonic()
        outcomes.append(error_of(lambda: total(backend))[1])
        assert time.monotonic() - begin < limit(2)
    meet(rank, "aborted")
    outcomes.append(backend.get_error().name)
    pending = torch.zeros(4)
    change(backend, 2, handles)
    work = backend.recv([pending], (rank.index + 1) % 3, 7)  # it never comes
    meet(rank, "posted")
    change(backend, 3, handles)  # which ends it
    outcomes.append(error_of(work.wait)[1])
    outcomes.append(total(backend))
    if rank.index == 0:  # the others do not come, and it is called off
        threading.Timer(0.2, backend.abort).start()
        outcomes.append(error_of(lambda: change(backend, 4, handles[:2]))[1])
        outcomes.append(error_of(lambda: total(backend))[1])
    elif rank.index == 1:
        time.sleep(0.1)
        outcomes.append(error_of(lambda: change(backend, 4, handles[:2][::-1], 0.5))[1])
        outcomes.append("")
    meet(rank, "called off")
    change(backend, 5, handles)
    outcomes.append(total(backend))
    return outcomes


def test_abort_from_another_thread() -> None:
    with ranks(3, None) as some:
        outcomes = some(stop_in_the_middle)
    assert "abort() was called" in outcomes[0].pop(0)
    assert outcomes[0][0] == "SUCCESS"  # it asked for that
    for own in outcomes:
        assert "reconfigure() was called" in own[1] or "rank" in own[1], own
        assert own[2] == own[-1] == 6
    assert "abort() was called" in outcomes[0][3]
    assert "the last reconfigure() has failed: abort() was called" in outcomes[0][4]
    assert "Timed out after" in outcomes[1][3]
    assert "rank 1" in outcomes[1][3] or "rank 0" in outcomes[1][3]


def say_why_not(rank: Rank) -> list[str]:
    backend = unconnected(rank)
    handles = gather(rank, "handles", backend._reconfigure_handle())
    change(backend, 1, handles)
    wrong: list[tuple[int, list[str]]] = [
        (1, handles),
        (2, [handles[1 - rank.index]]),
        (3, [*handles, handles[0]]),
        (4, [*handles, "nccl2:1:2:3"]),
    ]
    texts = [error_of(partial(change, backend, uuid, some))[1] for uuid, some in wrong]
    assert total(backend) == 3  # nothing has happened
    return texts


def test_wrong_arguments_change_nothing() -> None:
    with ranks(2, None) as some:
        outcomes = some(say_why_not)
    for reused, foreign, twice, unknown in outcomes:
        assert "uuid 1 was already used" in reused
        assert "own handle is not among the 1" in foreign
        assert "given twice" in twice
        assert "rank 2 introduces itself as 'nccl2:1:2:3'" in unknown
        assert "install the same version" in unknown


def spoilt(handle: str) -> dict[str, str]:
    """Handles of rank 1 that no process has given, and a word of each answer."""
    card, contact = handle.split(" | ")
    words = card.split(" ")
    there = [*words[:2], "elsewhere", "boot", "network", *words[5:]]
    away = " ".join(there)  # a card of another host: its contact is read
    key = " ".join(contact.split(" ")[:7])
    return {
        "": "does not understand",
        "x" * 1_000_000: "does not understand",
        "\u00e4\n": "does not understand",
        " ".join(words[:5]): "does not understand",
        " ".join([*words[:5], "s" * 101, *words[6:]]): "does not understand",
        " ".join(["b" * 1_000_000, *words[1:]]): "does not understand",
        " ".join([*words[:2], "h" * 1_000_000, *words[3:]]): "does not understand",
        " ".join([*words[:6], "9" * 40, *words[7:]]): "does not understand",
        away: "without an address",
        f"{away} | ": "without an address",
        f"{away} | {'z' * 1_000_000} y": "without an address",
        f"{away} | {key}": "without an address",
        f"{away} | {key} 127.0.0.1:99999": "not an address",
        f"{away} | {key} {'a' * 1_000_000}:1": "not an address",
    }


def take_nonsense(rank: Rank) -> list[tuple[str, str, str]]:
    backend = unconnected(rank)
    handles = gather(rank, "handles", backend._reconfigure_handle())
    change(backend, 1, handles)
    refusals = []
    for wrong, word in spoilt(handles[1]).items() if rank.index == 0 else []:
        kind, text = error_of(partial(change, backend, 2, [handles[0], wrong]))
        refusals.append((word, kind, text))
    meet(rank, "nonsense")
    assert total(backend) == 3  # nothing has happened
    change(backend, 2, handles[::-1])  # nor was the uuid used
    assert total(backend) == 3
    return refusals


def test_nonsense_in_handles_changes_nothing() -> None:
    with ranks(2, None) as some:
        refusals, _ = some(take_nonsense)
    assert len(refusals) == 14
    for word, kind, text in refusals:
        assert kind in ("DistBackendError", "RuntimeError"), (kind, text)
        assert word in text
        assert len(text) < 400, "the answer repeats what was given"


def abort_early(rank: Rank, transport: str) -> list[str]:
    backend = unconnected(rank, transport)
    backend.abort()  # before the first change
    outcomes = [error_of(lambda: total(backend))[1], backend.get_error().name]
    handles = gather(rank, "handles", backend._reconfigure_handle())
    change(backend, 1, handles)
    backend.abort()  # before the first operation
    outcomes += [error_of(lambda: total(backend))[1], backend.get_error().name]
    meet(rank, "aborted")
    change(backend, 2, handles)
    assert total(backend) == 3
    return outcomes


@pytest.mark.parametrize("transport", forms(TRANSPORTS, ""))
def test_abort_before_there_is_anything_to_end(transport: str) -> None:
    with ranks(2, None) as some:
        outcomes = some(abort_early, transport)
    for first, error, second, later in outcomes:
        assert "no reconfigure() has been called" in first or "abort() was called" in first
        assert "abort() was called" in second or "rank" in second
        assert (error, later) == ("SUCCESS", "SUCCESS")


def come_late(rank: Rank) -> list[int]:
    backend = unconnected(rank, "tcp")
    counts = [len(list(THREADS.iterdir()))]
    handles = gather(rank, "handles", backend._reconfigure_handle())
    counts.append(len(list(THREADS.iterdir())))
    if rank.index == 1:
        time.sleep(5)  # no thread answers at this rank's listener: attempts to connect end unheard
    change(backend, 1, handles)
    counts.append(len(list(THREADS.iterdir())))
    assert total(backend) == 3
    return counts


def test_a_handle_starts_no_thread() -> None:
    """It has an address. Nobody answers there until its rank calls for others itself."""
    with ranks(2, None) as some:
        for before, handed, changed in some(come_late):
            assert before == handed < changed


def time_changes(rank: Rank) -> list[float]:
    backend = unconnected(rank)
    handles = gather(rank, "handles", backend._reconfigure_handle())
    seconds = []
    for uuid in range(ROUNDS):
        meet(rank, f"round {uuid}")
        begin = time.perf_counter()
        change(backend, uuid, handles)
        seconds.append(time.perf_counter() - begin)
        assert total(backend) == 6
    before = len(list(FILES.iterdir()))
    for uuid in range(ROUNDS, ROUNDS + 20):
        change(backend, uuid, handles)
    assert abs(len(list(FILES.iterdir())) - before) <= 4
    return seconds


def test_a_change_is_quick() -> None:
    with ranks(3, None) as some:
        for seconds in some(time_changes):
            assert statistics.median(seconds) <= claim(TYPICAL)
            assert max(seconds) < claim(4.5)  # a store's new client may wait 5 s for a name server


def change_as_torch_does(rank: Rank) -> list[Any]:
    join(rank, enable_reconfigure=True)
    group = dist.group.WORLD
    assert dist._supports_reconfigure()
    handles = gather(rank, "handles", dist._get_reconfigure_handle())
    groups = []
    for uuid, some in enumerate([handles, set(handles), handles[::-1]]):
        dist._reconfigure(uuid, some, timeout=timedelta(seconds=limit(20))).wait()
        tensor = torch.full((4,), dist.get_rank() + 1.0)
        dist.all_reduce(tensor)
        assert dist.group.WORLD is group
        groups.append((dist.get_rank(), dist.get_world_size(), float(tensor[0])))
    return groups


@pytest.mark.skipif(not NATIVE, reason="torch has no reconfigure() before 2.14")
def test_torchs_own_calls() -> None:
    with ranks(3, None) as some:
        groups = some(change_as_torch_does)
    assert [own[0] for own in groups] == [(index, 3, 6) for index in range(3)]
    assert sorted(own[1][0] for own in groups) == [0, 1, 2]
    assert [own[2] for own in groups] == [(2 - index, 3, 6) for index in range(3)]


# ---- a call that is under way meanwhile


def change_under_a_call(rank: Rank, here: str) -> tuple[str, float]:
    """A signal's handler, called within an all_reduce that waits, changes the ranks several times.

    So the life that the call began in is the last but three when it goes on.
    """
    backend = unconnected(rank)
    handles = gather(rank, "handles", backend._reconfigure_handle())
    change(backend, 1, handles)
    if rank.index == 1:
        rank.store.wait(["over"])
        return "", 0.0

    def change_often() -> None:
        for uuid in range(2, 6):
            change(backend, uuid, handles[:1])

    def handle(*_: Any) -> None:
        if here == "in the handler":
            return change_often()
        thread = threading.Thread(target=change_often)
        thread.start()
        thread.join()
        return None

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    _, text = error_of(lambda: dist.all_reduce(torch.ones(1000)))
    answer = text, total(backend)
    rank.store.set("over", "")
    return answer


@pytest.mark.parametrize("here", ["in the handler", "in another thread"])
def test_a_call_outlives_the_life_it_began_in(here: str) -> None:
    with ranks(2, backend=None) as two:
        (text, sum_of_one), _ = two(change_under_a_call, here)
    assert "reconfigure() was called" in text
    assert sum_of_one == 1
