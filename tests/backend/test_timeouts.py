"""Timeouts that are longer than can be counted, and those that are over before they begin."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcomm
from lab.ranks import Rank, Ranks, error_of, ranks

LONG = [
    timedelta(milliseconds=2**31 - 1),
    timedelta(days=365 * 50),
    timedelta(days=40_000),
    timedelta.max,
]
OVER = [timedelta(0), timedelta(milliseconds=-1), timedelta(seconds=-5), timedelta(days=-300)]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as some:
        yield some


def backend_of(group: Any = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def use(rank: Rank, group: Any) -> None:
    """Call what counts time, with the peer behind."""
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    (dist.send if rank.index == 0 else dist.recv)(tensor, 1 - rank.index, group=group)
    assert tensor.eq(4).all()


def check_long(rank: Rank, limit: timedelta) -> str:
    group = dist.new_group(timeout=limit)
    use(rank, group)
    kept = backend_of(group).options._timeout
    group.set_timeout(limit)
    use(rank, group)
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.wait(limit)
    group.monitored_barrier(limit)
    group._get_backend(torch.device("cpu"))._add_ephemeral_timeout(limit)
    use(rank, group)
    dist.destroy_process_group(group)
    wanted = min(limit, timedelta(days=36525))
    return "" if abs(kept - wanted) < timedelta(minutes=5) else f"{kept} for {wanted}"


@pytest.mark.parametrize("limit", LONG, ids=str)
def test_a_timeout_of_years(two: Ranks, limit: timedelta) -> None:
    assert two(check_long, limit) == ["", ""]


def check_over(rank: Rank, limit: timedelta) -> list[tuple[str, str]]:
    group = dist.new_group()
    backend, tensor = backend_of(group), torch.ones(1)
    calls = [
        lambda: dist.new_group(timeout=limit),
        lambda: ringcomm.Options(timeout=limit),
        lambda: setattr(ringcomm.Options(), "_timeout", limit),
        lambda: group.set_timeout(limit),
        lambda: backend._set_default_timeout(limit),
        lambda: backend._add_ephemeral_timeout(limit),
        lambda: backend._reconfigure(7, [backend._reconfigure_handle()], limit),
    ]
    if limit:  # a wait of no time at all is torch's word for the group's timeout
        calls.append(lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(limit))
        calls.append(lambda: waiting(tensor).wait(limit))
        if limit != timedelta(milliseconds=-1):  # torch's word for none that is given
            calls.append(lambda: group.monitored_barrier(limit))
    errors = [error_of(call) for call in calls]
    use(rank, group)  # which goes on
    return errors


@pytest.mark.parametrize("limit", OVER, ids=str)
def test_a_timeout_that_is_over_says_so(two: Ranks, limit: timedelta) -> None:
    for errors in two(check_over, limit):
        for number, (kind, text) in enumerate(errors):
            assert kind == "ValueError", (number, text)
            assert f"a timeout of {limit / timedelta(milliseconds=1):.0f} ms is over before" in text
            assert "timedelta.max" in text


def waiting(tensor: torch.Tensor) -> Any:
    """An asynchronous quantized all_reduce."""
    return ringcomm.compression.quantized_all_reduce(tensor, async_op=True)


def check_quantized(rank: Rank) -> tuple[str, str]:
    """One rank comes late: a wait that is short ends, and the operation does not."""
    tensor = torch.full((1000,), rank.index + 1.0)
    ringcomm.compression.quantized_all_reduce(torch.ones(1))  # which makes subgroups
    error = ("", "")
    if rank.index == 1:
        rank.store.wait(["waited"])
    work = waiting(tensor)
    if rank.index == 0:
        error = error_of(lambda: work.wait(timedelta(seconds=0.2)))
        rank.store.set("waited", "")
    work.wait(timedelta.max)
    assert tensor.eq(3).all()
    return error


def test_a_quantized_wait_that_is_too_short_ends_nothing(two: Ranks) -> None:
    kind, text = two(check_quantized)[0]
    assert kind == "RuntimeError"
    assert text.startswith("Operation timed out! quantized_all_reduce has not ended within 0:00:00")
