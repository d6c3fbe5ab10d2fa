"""Calls as torch.profiler shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks, ranks
from lab.simulated_device import SMALL, SimulatedMemory, on_device

BYTES = 6 * 7 * 4


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with ranks(3) as some:
        yield some


def check_profile(rank: Rank, path: Path) -> list[tuple[str, bool, Any]]:
    tensor = torch.ones(6, 7)
    own = dist.get_rank()
    with profile(record_shapes=True) as profiler:
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0, async_op=True).wait()
        dist.barrier()
        if own == 0:
            dist.send(tensor, 1)
        if own == 1:
            dist.recv(tensor, 0)
    profiler.export_chrome_trace(str(path / f"{own}.json"))
    return [(e.name, e.is_async, e.input_shapes) for e in profiler.events()]


def arguments_in(path: Path) -> dict[str, tuple[str, int]]:
    """Return algorithm and bytes of each call, by its name."""
    return {
        event["name"]: (event["args"]["algorithm"], event["args"]["bytes"])
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("name", "").startswith("ringcomm:") and "args" in event
    }


def test_profiles_show_the_calls(three: Ranks, tmp_path: Path) -> None:
    for rank, events in enumerate(three(check_profile, tmp_path)):
        assert ("ringcomm:all_reduce", True, [[6, 7]]) in events
        assert ("ringcomm:broadcast", True, [[6, 7]]) in events
        frames = [name for name, *_ in events].count("record_param_comms")
        assert frames == 3 + (rank < 2)
        calls = arguments_in(tmp_path / f"{rank}.json")
        assert calls["ringcomm:all_reduce"] == ("direct", BYTES)
        assert calls["ringcomm:broadcast"] == ("direct", BYTES)
        assert calls["ringcomm:barrier"][1] == 0
        messages = {name: call for name, call in calls.items() if call[0] == "message"}
        expected = [{"ringcomm:send": ("message", BYTES)}, {"ringcomm:recv": ("message", BYTES)}]
        assert messages == [*expected, {}][rank]


def check_on_a_device(rank: Rank, path: Path, settings: dict[str, str]) -> Outcome:
    def body(rank: Rank) -> None:
        tensor = SimulatedMemory().empty(6 * 7).fill_(1)
        with profile(record_shapes=True) as profiler:
            dist.all_reduce(tensor)  # the group's first meeting
            dist.all_reduce(tensor, async_op=True).wait()
        profiler.export_chrome_trace(str(path / f"{rank.index}.json"))

    return on_device(rank, "profiled", settings, body)


@pytest.mark.parametrize(("mode", "algorithm"), [("auto", "hand_over"), ("host", "direct")])
def test_profiles_of_a_device(tmp_path: Path, mode: str, algorithm: str) -> None:
    with ranks(2, backend=None) as pair:
        pair(check_on_a_device, tmp_path, {**SMALL, "RINGCOMM_CUDA_MODE": mode})
    for rank in range(2):
        calls = arguments_in(tmp_path / f"{rank}.json")
        assert calls == {"ringcomm:all_reduce": (algorithm, BYTES)}
