"""Everything that the package gives to programs, under TORCH_DISTRIBUTED_DEBUG=DETAIL.

torch puts a wrapper around each backend then, which has none of the backend's own functions.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from lab import ROOT
from lab.ranks import Rank, error_of, join, ranks
from lab.trainee import Log, Plan, run
from lab.trainees import trainees
from ringcomm._runtime import host
from ringcomm.compression import hooks


def backend(rank: Rank) -> None:
    ours = ringcomm.backend_of()
    assert type(ours).__module__ == "ringcomm._C", type(ours)
    assert ours.flight_record()[-1]["operation"].startswith("all_reduce")
    assert ours.options.flows
    assert ours.get_error().name == "SUCCESS"


def figures(rank: Rank) -> None:
    assert ringcomm.stats()["operations"]
    assert "ringcomm" in ringcomm.metrics()


def dump(rank: Rank) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert ringcomm.dump(folder) is not None


def registered(rank: Rank) -> None:
    """Our function is found: it is the one that knows that the CPU needs no registration."""
    kind, text = error_of(lambda: ringcomm.backend_of().register_tensors(torch.ones(1000)))
    assert kind == "RuntimeError"
    assert "need no registration" in text


def two_hosts(rank: Rank) -> None:
    """Have hooks make subgroups, as between hosts."""
    host.__dict__["key"] = lambda index: f"host {index // 2}"


def quantized(rank: Rank) -> None:
    two_hosts(rank)
    tensor = torch.ones(1000)
    ringcomm.compression.quantized_all_reduce(tensor, 8)
    assert tensor.eq(rank.size).all()


def hooked(rank: Rank) -> None:
    two_hosts(rank)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(64, 64))
    state = hooks.register(model, "int8")
    model(torch.ones(2, 64)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    state.close()


def shrink(rank: Rank) -> None:
    if rank.index != rank.size - 1:
        dist.shrink_group([rank.size - 1])
        tensor = torch.ones(8)
        dist.all_reduce(tensor)
        assert tensor.eq(rank.size - 1).all()
        rank.store.set(f"shrunk/{rank.index}", "")
    for index in range(rank.size - 1):
        rank.store.get(f"shrunk/{index}")


ENTRIES = [backend, figures, dump, registered, quantized, hooked, shrink]


def under_detail(rank: Rank, entry: Callable[[Rank], None]) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    join(rank)
    tensor = torch.ones(8)
    dist.all_reduce(tensor)
    assert tensor.eq(rank.size).all()
    entry(rank)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_entries(entry: Callable[[Rank], None]) -> None:
    with ranks(4, None) as some:
        some(under_detail, entry)


def in_detail(plan: Plan, log: Log) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    run(plan, log)


def test_an_elastic_training() -> None:
    """It founds a world, and takes in another rank.

    A death would be told by torch's wrapper, in ten seconds and in words of its own.
    """
    with trainees(3, in_detail, epochs=60, pause=0.01) as some:
        some.await_events([0, 1, 2], "step", 3)
        (joiner,) = some.start()
        some.await_events([joiner], "step", 3)
        some.check_equal()
        some.check_ledger()


@pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not here")
def test_a_group_of_torchft() -> None:
    torchft = importlib.import_module("ringcomm.torchft")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = torchft.ProcessGroupRingcomm()
    group.configure(f"127.0.0.1:{store.port}/one", "one", 0, 1)
    assert group.errored() is None
    group.abort()


def test_one_function_finds_the_backend() -> None:
    """Elsewhere `_get_backend()` would be the wrapper. Its other uses are about torch's objects."""
    here = {Path("ringcomm/_runtime/backend.py")}
    users = {
        path.relative_to(ROOT)
        for path in [*(ROOT / "ringcomm").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
        if re.search(r"_get_backend\(", path.read_text())
    }
    assert users - {Path("ringcomm/_runtime/groups.py")} <= here
