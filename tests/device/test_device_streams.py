"""torch's streams, events and futures, as ProcessGroupNCCL treats them.

torch here has no CUDA, so tests/sim/torch_cuda.cc gives it a simulated device whose streams are
slow: a result is not there before somebody has waited for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab import ROOT
from lab.outcomes import Outcome
from lab.ranks import Rank, Ranks
from lab.simulated_device import SLOW, Cuda, met, on_device


def backend_of(device: torch.device) -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(device)


def run(rank: Rank, life: str, case: str, settings: dict[str, str]) -> Outcome:
    def body(rank: Rank) -> str:
        return str(CASES[case](rank, met()))

    return on_device(rank, life, settings, body)


def synchronous(rank: Rank, cuda: Cuda) -> str:
    """The call returns at once; its result is there for what follows in the caller's stream."""
    memory, tensor = cuda.full(1000, rank.index + 1.0)
    stream = cuda.module.new_stream()
    cuda.module.use_stream(stream)
    begin = time.monotonic()
    assert dist.all_reduce(tensor) is None
    if time.monotonic() - begin > 0.015:
        return "the host waited"
    if memory.eq(3).all():
        return "it is over already: this test shows nothing"
    cuda.synchronize()
    return "" if memory.eq(3).all() else f"the caller's stream did not run it: {memory[:3]}"


def asynchronous(rank: Rank, cuda: Cuda) -> str:
    """Beside the caller's stream; wait() makes that one wait, not the host."""
    memory, tensor = cuda.full(1000, rank.index + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    cuda.synchronize()  # the current stream has nothing to do with it
    if work.is_completed() or memory.eq(3).all():
        return "it ran in the caller's stream"
    begin = time.monotonic()
    work.wait()
    if time.monotonic() - begin > 0.015:
        return "the host waited"
    cuda.synchronize()
    if not (memory.eq(3).all() and work.is_completed()):
        return "wait() did not make the stream wait"
    return ""


def ordered(rank: Rank, cuda: Cuda) -> str:
    """Operations of a group run in the order of the calls, whatever streams they are in."""
    memory, tensor = cuda.full(1000, 1.0)
    first = dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor)
    cuda.module.use_stream(cuda.module.new_stream())
    dist.all_reduce(tensor)
    cuda.synchronize()
    first.wait()
    return "" if memory.eq(8).all() else f"{memory[:3]}"


def future(rank: Rank, cuda: Cuda) -> str:
    """Complete at once; callbacks' streams and those that wait come after the operation."""
    memory, tensor = cuda.full(1000, rank.index + 1.0)
    promised = dist.all_reduce(tensor, async_op=True).get_future()
    if not promised.done():
        return "the future is not complete"
    if memory.eq(3).all():
        return "it is over already: this test shows nothing"
    promised.wait()
    cuda.synchronize()
    return "" if memory.eq(3).all() else "wait() of the future did not make the stream wait"


def barrier(rank: Rank, cuda: Cuda) -> str:
    """The host waits for it, and for what is before it."""
    memory, tensor = cuda.full(1000, rank.index + 1.0)
    dist.all_reduce(tensor)
    options = dist.BarrierOptions()
    options.device = tensor.device
    options.asyncOp = False
    backend_of(tensor.device).barrier(options)  # dist.barrier() makes a tensor, by a kernel
    return "" if memory.eq(3).all() else "the barrier was over before the all_reduce"


def messages(rank: Rank, cuda: Cuda) -> str:
    """In both directions at once, one after the other and as a batch."""
    other = 1 - rank.index
    sent = cuda.full(50_000, rank.index + 1.0)[1]
    memory, received = cuda.full(50_000, 0.0)
    works = [dist.isend(sent, other), dist.irecv(received, other)]
    for work in works:
        work.wait()
    cuda.synchronize()
    if not memory.eq(other + 1.0).all():
        return "isend, irecv"
    memory, received = cuda.full(50_000, 0.0)
    batch = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    cuda.synchronize()
    return "" if memory.eq(other + 1.0).all() else "batch_isend_irecv"


def forgotten(rank: Rank, cuda: Cuda) -> str:
    """Memory is not given back under way, even if nobody waits, or keeps the tensor."""
    for _ in range(5):
        dist.all_reduce(cuda.full(1000, 1.0)[1], async_op=True)
    memory, tensor = cuda.full(1000, 1.0)
    dist.all_reduce(tensor)
    cuda.synchronize()
    return "" if memory.eq(2).all() else f"{memory[:3]}"


def several(rank: Rank, cuda: Cuda) -> str:
    """Messages to one peer as a batch, at the other end one by one; a group's first operation."""
    group = dist.new_group()
    other = 1 - rank.index
    (ones, first), (two, second) = cuda.full(60_000, 1.0), cuda.full(60_000, 2.0)
    if rank.index == 0:
        batch = [dist.P2POp(dist.isend, tensor, 1, group) for tensor in (first, second)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    else:
        ones.zero_()
        two.zero_()
        dist.recv(first, 0, group)
        dist.recv(second, 0, group)
    cuda.synchronize()
    if not (ones.eq(1).all() and two.eq(2).all()):
        return f"{ones[0]} {two[0]} {ones.unique()} {two.unique()}"
    batch = [
        dist.P2POp(dist.isend, first, other, group),
        dist.P2POp(dist.irecv, second, other, group),
    ]
    futures = [work.get_future() for work in dist.batch_isend_irecv(batch)]
    for future in futures:
        future.wait()
    dist.all_reduce(second, group=group)
    cuda.synchronize()
    return "" if two.eq(2).all() else f"{two.unique()}"


def destroyed(rank: Rank, cuda: Cuda) -> str:
    """Streams do the rest of their work when the group has been destroyed."""
    memory, tensor = cuda.full(1000, 2.0**-50)
    for _ in range(50):
        dist.all_reduce(tensor)
    begin = time.monotonic()
    dist.destroy_process_group()
    if time.monotonic() - begin < 1.1:
        return "too fast to tell"
    return "" if memory.eq(1).all() else f"{memory.unique()}"


def inherited(rank: Rank, cuda: Cuda) -> str:
    """A forked child may look at a Work of its parent's, and drop it."""
    works = [dist.all_reduce(cuda.full(1000, 1.0)[1], async_op=True) for _ in range(2)]
    child = os.fork()
    if child == 0:
        works[0].is_completed()
        works.clear()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    works[1].wait()
    cuda.synchronize()
    return "" if status == 0 else f"the child ended with {status}"


def mixed(rank: Rank, cuda: Cuda) -> str:
    """One group serves both devices; one call does not."""
    on_host = torch.ones(10)
    try:
        dist.all_gather([on_host, on_host.clone()], cuda.full(10, 1.0)[1])
    except RuntimeError as error:
        return "" if "move them to one device" in str(error) else str(error)
    return "no error"


def fails(rank: Rank, cuda: Cuda) -> str:
    """An operation that fails under way: wait() and the next call raise, and the stream is free."""
    tensor = cuda.full(1000, 1.0)[1]
    if rank.index == 1:
        os._exit(0)
    try:
        work = dist.all_reduce(tensor, async_op=True)
    except dist.DistBackendError as error:  # its death was noticed before the call
        return "" if "rank 1" in str(error) else str(error)
    work.wait()
    begin = time.monotonic()
    cuda.synchronize()
    if time.monotonic() - begin > 2:
        return "the stream waited on"
    for call in (work.wait, lambda: dist.all_reduce(tensor)):
        try:
            call()
        except dist.DistBackendError as error:
            if "rank 1" not in str(error):
                return str(error)
        else:
            return "no error"
    return "" if work.exception() is not None else "no exception"


CASES: dict[str, Callable[[Rank, Cuda], str]] = {
    case.__name__: case
    for case in (
        *(synchronous, asynchronous, ordered, future, barrier, messages, several),
        *(forgotten, mixed, inherited, destroyed),
    )
}
CASES["fails"] = fails


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["auto", pytest.param("host", marks=pytest.mark.slow)])
def test_streams(two: Ranks, case: str, way: str) -> None:
    settings = {**SLOW, "RINGCOMM_CUDA_MODE": way}
    outcomes = two(run, f"{case} {way}", case, settings)
    if case == "fails":
        outcomes = outcomes[:1]
    assert [outcome.get("answer") for outcome in outcomes] == [""] * len(outcomes), outcomes


FOR_CPUS = """
import torch.distributed as dist
from lab.simulated_device import Cuda

memory, tensor = Cuda().full(3, 1.0)
devices = "cpu:ringcomm,cuda:ringcomm"  # torch sees no device here
dist.init_process_group(devices, store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(memory)
dist.all_reduce(tensor)
"""


def test_a_build_for_cpus_only(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    without = shutil.ignore_patterns("libringcomm_cuda.so", "__pycache__")
    shutil.copytree(ROOT / "ringcomm", tmp_path / "ringcomm", ignore=without)
    (tmp_path / "job.py").write_text(FOR_CPUS)
    done = run(sys.executable, tmp_path / "job.py", PYTHONPATH=str(ROOT))
    assert "this build serves CPU tensors only (" in done.stderr, done.stderr
    assert "): run 'pip install ringcomm-cuda' if it came in a wheel," in done.stderr, done.stderr
