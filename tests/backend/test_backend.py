"""Beside sums, torch.distributed asks for this: Work, layouts, errors, the life of a group."""

from __future__ import annotations

import copy
import gc
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Run

from lab.limits import limit
from lab.oracle import bits, values
from lab.ranks import Rank, Ranks, error_of, join


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    some = Ranks(request.param)
    yield some
    some.leave()


def backend_of(group: Any = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def total(size: int) -> int:
    return size * (size + 1) // 2


# ---- Work


def check_work(rank: Rank) -> None:
    tensor = torch.full((5000,), rank.index + 1.0)
    number = backend_of()._get_sequence_number_for_group()
    work = dist.all_reduce(tensor, async_op=True)
    seen: list[Any] = []
    future = work.get_future()
    then = future.then(lambda done: seen.append(done.value()[0].sum().item()))
    assert work.wait()
    then.wait()
    assert seen == [total(rank.size) * 5000]
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0].data_ptr() == tensor.data_ptr()
    assert work.get_future().value()[0].data_ptr() == tensor.data_ptr()
    assert work._get_duration() > 0
    assert backend_of()._get_sequence_number_for_group() == number + 1
    assert dist.barrier(async_op=True).get_future().wait() == []
    assert dist.all_reduce(tensor) is None


def test_work(ranks: Ranks) -> None:
    ranks(check_work)


def check_outstanding(rank: Rank) -> None:
    """Many at once, dropped or waited for in another order."""
    tensors = [torch.full((10 + 997 * i,), rank.index + 1) for i in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    del works[::3]
    gc.collect()
    for work in reversed(works):
        work.wait()
    last = torch.ones(1)
    dist.all_reduce(last)  # after all of them
    assert all(tensor.eq(total(rank.size)).all() for tensor in tensors)


def test_many_outstanding(ranks: Ranks) -> None:
    ranks(check_outstanding)


def check_short_wait(rank: Rank) -> tuple[str, str]:
    tensor, error = torch.ones(3), ("", "")
    if rank.index == 0:
        work = dist.all_reduce(tensor, async_op=True)
        error = error_of(lambda: work.wait(timedelta(milliseconds=50)))
        dist.send(tensor.clone(), 1)
        work.wait()  # it went on
    else:
        if rank.index == 1:
            dist.recv(torch.empty(3), 0)
        dist.all_reduce(tensor)
    assert tensor.eq(rank.size).all()
    return error


def test_a_wait_that_is_too_short_ends_nothing(ranks: Ranks) -> None:
    kind, text = ranks(check_short_wait)[0]
    assert kind == "RuntimeError"
    assert text.startswith("Operation timed out!")


# ---- tensors that are not simply contiguous


def check_layouts(rank: Rank) -> None:
    n, me = rank.size, rank.index
    inputs = [values(r, 24 * 50, torch.float32).view(24, 50) for r in range(n)]
    base, expected = inputs[me], torch.stack(inputs).sum(0)
    for is_async in (False, True):
        sliced, turned = torch.zeros(48, 100), base.t().clone(memory_format=torch.preserve_format)
        view = sliced[::2, ::2]
        view.copy_(base)
        image = base.clone().view(2, 3, 4, 50).to(memory_format=torch.channels_last)
        scalar = base[3, 3].clone()
        for tensor, wanted in (
            (view, expected),
            (turned, expected.t()),
            (image, expected.view(2, 3, 4, 50)),
            (scalar, expected[3, 3]),
        ):
            work = dist.all_reduce(tensor, async_op=is_async)
            if is_async:
                work.wait()
            torch.testing.assert_close(tensor, wanted)
        assert sliced[1::2].eq(0).all()
    negative = torch.complex(base, -base).conj().imag
    assert negative.is_neg()
    backend_of().allreduce([negative]).wait()  # torch's dispatcher would lose the result
    torch.testing.assert_close(negative, expected)
    outputs = [torch.zeros(50, 24).t() for _ in range(n)]
    dist.all_gather(outputs, base)
    assert [bits(output) for output in outputs] == [bits(tensor) for tensor in inputs]
    into = torch.zeros(100, 24).t()[:, ::2]
    if me == 0:
        dist.send(base.t(), 1)
    elif me == 1:
        dist.recv(into.t(), 0)
        assert bits(into) == bits(inputs[0])


def test_layouts(ranks: Ranks) -> None:
    ranks(check_layouts)


def check_unequal_layouts(rank: Rank) -> tuple[str, str]:
    group = dist.new_group(timeout=timedelta(seconds=20))
    image = torch.ones(2, 3, 4, 5)
    if rank.index == 0:
        image = image.to(memory_format=torch.channels_last)
    error = error_of(lambda: dist.all_reduce(image, group=group))
    dist.destroy_process_group(group)
    return error


def test_unequal_layouts_are_refused(ranks: Ranks) -> None:
    for kind, text in ranks(check_unequal_layouts):
        assert kind == "DistBackendError"
        assert "memory layout" in text


# ---- wrong arguments: refused before anything is sent


def wrong_calls(rank: Rank) -> list[tuple[str, Any, str]]:
    n, me, group = rank.size, rank.index, dist.group.WORLD
    src, two = torch.ones(2), torch.ones(3)
    root = dist.BroadcastOptions()
    root.rootRank = 7
    second, reduced = dist.BroadcastOptions(), dist.ReduceOptions()
    second.rootTensor = reduced.rootTensor = 1
    last = dist.GatherOptions()
    last.rootRank = (me + 1) % n
    band = dist.AllreduceOptions()
    band.reduceOp = dist.ReduceOp.BAND
    return [
        ("root", lambda: group.broadcast([src], root), "invalid root rank: 7"),
        ("tensor", lambda: group.broadcast([src], second), "invalid root tensor: 1"),
        ("tensor", lambda: group.reduce([src], reduced), "invalid root tensor: 1"),
        (
            "two",
            lambda: group.allreduce([src, two], dist.AllreduceOptions()),
            "make a call for each",
        ),
        ("op", lambda: group.allreduce([src], band), "Cannot use ReduceOp.BAND with tensors of"),
        ("sparse", lambda: backend_of().reduce([src.to_sparse()], dist.ReduceOptions()), "dense"),
        ("max", lambda: dist.all_reduce(src.to_sparse(), dist.ReduceOp.MAX), "ReduceOp.SUM"),
        ("meta", lambda: backend_of().allreduce([src.to("meta")]), "CPU"),
        (
            "list",
            lambda: group.allgather([[src]], [src]),
            f"output tensor list size 1 does not match world size {n}",
        ),
        ("types", lambda: group.allgather([[two.int()] * n], [two]), "invalid tensor type"),
        ("sizes", lambda: group.allgather([[two] * n], [src]), "invalid tensor size at index"),
        ("whole", lambda: dist.all_gather_into_tensor(two, src), "invalid tensor size"),
        ("gather", lambda: group.gather([[src] * n], [src], last), "empty output on non-root"),
        ("gather", lambda: dist.gather(src, [src] * (n + 1) if me == 0 else [src], 0), ""),
        (
            "scatter",
            lambda: group.reduce_scatter([src], [[src]]),
            f"input tensor list size 1 does not match world size {n}",
        ),
        ("splits", lambda: dist.all_to_all_single(src, src, [1] * n, [5] + [1] * (n - 1)), "dim 0"),
        ("number", lambda: dist.all_to_all_single(src, src, [2], [2]), "Number of tensor splits"),
        ("equal", lambda: dist.all_to_all_single(torch.ones(n + 1), torch.ones(n + 1)), "divide"),
        ("lists", lambda: dist.all_to_all([src], [src]), f"does not match world size {n}"),
        ("tag", lambda: dist.send(src, (me + 1) % n, tag=-1), "Tag must be nonnegative"),
        ("peer", lambda: group.send([src], 99, 0), "invalid rank: 99"),
        ("overlap", lambda: dist.all_reduce(torch.ones(1).expand(4)), "single memory location"),
    ]


def check_wrong_calls(rank: Rank) -> list[tuple[str, str, str, str]]:
    errors = [(name, *error_of(call), wanted) for name, call, wanted in wrong_calls(rank)]
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group still works
    assert tensor.item() == rank.size
    return errors


def test_wrong_arguments(ranks: Ranks) -> None:
    for errors in ranks(check_wrong_calls):
        for name, kind, text, wanted in errors:
            assert kind in ("RuntimeError", "ValueError"), f"{name}: {kind} {text}"
            assert wanted in text, f"{name}: {text}"


# ---- a group's life


def check_life(rank: Rank) -> None:
    backend = backend_of()
    assert backend.name() == "ringcomm"
    assert type(backend).__module__ == "ringcomm._C"
    assert backend.get_error().name == "SUCCESS"
    options, timeout = backend.options, backend.options._timeout
    options._timeout = timedelta(seconds=1)
    assert backend.options._timeout == timeout != options._timeout, "the options are not a copy"
    options.algorithm = "ring"
    assert copy.deepcopy(options).algorithm == "ring"
    kind, text = error_of(lambda: setattr(options, "algorithm", "best"))
    assert (kind, "use one of direct, ring" in text) == ("ValueError", True)
    dist.group.WORLD.set_timeout(timedelta(seconds=50))
    assert backend.options._timeout == timedelta(seconds=50)
    dist.group.WORLD.set_timeout(timedelta(seconds=60))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20), True)
    assert not dist.group.WORLD._has_hooks()


def test_life(ranks: Ranks) -> None:
    ranks(check_life)


def check_split(rank: Rank) -> None:
    world = dist.group.WORLD
    for _ in range(2):
        part = world.split_group([0, 1], timedelta(seconds=30), None, None, "part")
        assert (part is None) == (rank.index > 1)
        if part is not None:
            tensor = torch.ones(10)
            part.allreduce([tensor]).wait()
            assert tensor.eq(2).all()
            part.shutdown()
    backend = backend_of()
    assert backend._is_initialized()
    assert backend.comm_split_count() == (2 if rank.index < 2 else 0)
    backend.perform_nocolor_split(torch.device("cuda", 0))
    for call in (backend.register_mem_pool, backend.deregister_mem_pool):
        with pytest.raises(TypeError, match=r"give a torch\.cuda\.MemPool, not object"):
            call(object())
    with pytest.raises(RuntimeError, match="tensors of the CPU need no registration"):
        backend.register_tensors(torch.ones(3))


def test_split(ranks: Ranks) -> None:
    ranks(check_split)


def check_missing_rank(rank: Rank, every: bool) -> tuple[str, str, float]:
    group = dist.new_group()
    begin = time.monotonic()
    error = ("", "")
    if rank.index != 1:
        error = error_of(lambda: group.monitored_barrier(timedelta(seconds=4), every))
    seconds = time.monotonic() - begin
    dist.barrier()
    dist.destroy_process_group(group)
    return (*error, seconds)


@pytest.mark.parametrize("every", [False, True])
def test_monitored_barrier_names_who_is_missing(ranks: Ranks, every: bool) -> None:
    answers = ranks(check_missing_rank, every)
    word = "Ranks" if every else "Rank"
    assert f"[Rank 0]: {word} 1 failed to pass monitoredBarrier in 4000 ms" in answers[0][1]
    for other, (kind, text, _) in enumerate(answers):
        if other != 1:
            assert kind == "DistBackendError"
            assert re.search(r"barrier #1: .*waiting for rank 1 \(", text), text
        if other > 1:
            assert f"Rank {other} successfully reached monitoredBarrier" in text


def test_exit_without_destroy_is_silent(python: Run) -> None:
    script = """
import os, sys, tempfile, torch, torch.distributed as dist, ringcomm
store = tempfile.mktemp()
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("ringcomm", init_method=f"file://{store}", rank=rank, world_size=2)
tensor = torch.ones(1000)
works = [dist.all_reduce(tensor, async_op=True)]
if rank == 0:
    works.append(dist.irecv(tensor, 1))
    works[0].wait()
    works[1].get_future().then(lambda done: print("called"))
else:
    works[0].wait()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    begin = time.monotonic()
    result = python(script, ZYGOTE_WHOLE="1")
    assert (result.returncode, result.stdout, result.stderr) == (0, "called\n", "")
    assert time.monotonic() - begin < limit(15)


def check_file_store(rank: Rank, path: str) -> None:
    store = dist.FileStore(path, rank.size)
    join(Rank(rank.index, rank.size, store))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == rank.size
    dist.destroy_process_group()


def test_file_store(tmp_path: Any) -> None:
    ranks = Ranks(2, backend=None)
    ranks(check_file_store, str(tmp_path / "store"))
    ranks.leave()
