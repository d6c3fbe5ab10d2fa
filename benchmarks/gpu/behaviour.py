"""The behavior that PyTorch's programs rely on: streams, futures, groups, memory, DDP and FSDP.

Each check runs on every rank, and returns the note of its row. On the simulated device
there is one stream and wait() blocks the host, so times of the host are looked at on a GPU only.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gpu.table
from gpu.ranks import DeviceRanks, Entry, environment, meet, place_of, preload_training
from gpu.stages import Settings, last_line, parts
from gpu.table import Row
from lab.ranks import Rank

COUNT = 300_007
BUSY = 60.0  # milliseconds that the GPU is kept busy, and the host is not to wait
EXPANDABLE = "expandable_segments:True"
ROUNDS = 20

Check = Callable[[Rank], str]


def total(rank: Rank) -> int:
    return rank.size * (rank.size + 1) // 2


def same(tensor: torch.Tensor, value: float) -> None:
    wrong = int(tensor.ne(value).sum())
    assert wrong == 0, f"{wrong} of {tensor.numel()} elements are not {value}"


# ---- streams


def in_the_current_stream(rank: Rank) -> str:
    """A kernel before the call and one after it, with no wait by the host between them."""
    place = place_of(rank)
    tensor = place.full(COUNT, 0)
    for busy in (0.0, BUSY):  # the first time kernels are loaded
        meet(rank)
        with place.stream():
            start = time.perf_counter()
            place.busy(busy)
            tensor.fill_(rank.index + 1)
            dist.all_reduce(tensor)
            tensor.mul_(2)
            host = time.perf_counter() - start
            same(tensor, 2 * total(rank))
    return _on_host(rank, host)


def asynchronous(rank: Rank) -> str:
    """The same beside the current stream; wait() makes the stream wait."""
    place = place_of(rank)
    tensor, other = place.full(COUNT, 0), place.full(COUNT, 0)
    for busy in (0.0, BUSY):
        meet(rank)
        start = time.perf_counter()
        place.busy(busy)
        tensor.fill_(rank.index + 1)
        work = dist.all_reduce(tensor, async_op=True)
        other.add_(1)
        work.wait()
        tensor.mul_(2)
        host = time.perf_counter() - start
        same(tensor, 2 * total(rank))
    same(other, 2)
    return _on_host(rank, host)


def _on_host(rank: Rank, seconds: float) -> str:
    if not place_of(rank).is_cuda:
        return ""
    assert seconds < BUSY / 2e3, f"the host waited {1e3 * seconds:.1f} ms for the GPU"
    return f"host {1e6 * seconds:.0f} µs while the GPU was busy for about {BUSY:.0f} ms"


def another_stream(rank: Rank) -> str:
    """Operations from two streams by turns come one after the other."""
    place = place_of(rank)
    tensors = [place.full(COUNT, rank.index + 1) for _ in range(6)]
    meet(rank)
    works = []
    for tensor in tensors:
        with place.stream():
            place.busy(1)
            works.append(dist.all_reduce(tensor, async_op=True))
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        same(tensor, total(rank))
    return ""


def futures(rank: Rank) -> str:
    """A future's value is used in the caller's stream."""
    tensor = place_of(rank).full(COUNT, rank.index + 1)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    same(future.then(lambda done: done.value()[0] * 3).wait(), 3 * total(rank))
    return ""


def forgotten(rank: Rank) -> str:
    """Let go of a tensor whose work nobody has waited for; the next results must be right."""
    place = place_of(rank)
    for number in range(ROUNDS):
        tensor = place.full(COUNT, number)
        dist.all_reduce(tensor, async_op=True)
        del tensor
    after = place.full(COUNT, rank.index + 1)
    dist.all_reduce(after)
    same(after, total(rank))
    return ""


def barrier(rank: Rank) -> str:
    """When it has returned on any rank, every rank has called it."""
    for number in range(5):
        rank.store.set(f"before/{number}/{rank.index}", "x")
        dist.barrier()
        for other in range(rank.size):
            assert rank.store.check([f"before/{number}/{other}"]), f"rank {other} had not come"
    return ""


# ---- several at once, and groups


def coalesced(rank: Rank) -> str:
    place = place_of(rank)
    tensors = [place.full(count, rank.index + 1) for count in (1, 1001, COUNT)]
    with dist._coalescing_manager(device=place.device):
        for tensor in tensors:
            dist.all_reduce(tensor)
    with dist._coalescing_manager(device=place.device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        same(tensor, rank.size * total(rank))
    return ""


def messages(rank: Rank) -> str:
    """Round the ring, both ways at once, in sizes from nothing to several chunks."""
    place, n = place_of(rank), rank.size
    for count in (0, 1, 1001, 3_000_000):
        mine = place.full(count, rank.index)
        from_before, from_after = place.full(count, -1), place.full(count, -1)
        before, after = (rank.index - 1) % n, (rank.index + 1) % n
        asked = [(dist.isend, mine, after), (dist.irecv, from_before, before)]
        asked += [(dist.isend, mine, before), (dist.irecv, from_after, after)]
        for work in dist.batch_isend_irecv([dist.P2POp(*message) for message in asked]):
            work.wait()
        same(from_before, before)
        same(from_after, after)
    return ""


def subgroups(rank: Rank) -> str:
    """Groups of some of the ranks, of one, and one more of all."""
    place = place_of(rank)
    sets = [[0, rank.size - 1], *[[r] for r in range(rank.size)], list(range(rank.size))]
    for members in sets:
        group = dist.new_group(members, timeout=timedelta(seconds=30))
        if rank.index in members:
            tensor = place.full(COUNT, rank.index + 1)
            dist.all_reduce(tensor, group=group)
            same(tensor, sum(member + 1 for member in members))
            dist.destroy_process_group(group)
    return f"{len(sets)} groups"


def split(rank: Rank) -> str:
    place = place_of(rank)
    members = [0, rank.size - 1]
    made = dist.group.WORLD.split_group(members, timedelta(seconds=30), None, None, "part")
    assert (made is None) == (rank.index not in members)
    if made is not None:
        tensor = place.full(COUNT, 1)
        made.allreduce([tensor]).wait()
        same(tensor, 2)
        place.synchronize()
        made.shutdown()
    return ""


# ---- memory


def memory_comes_and_goes(rank: Rank) -> str:
    """Memory is freed between operations, so what others have mapped of it grows stale."""
    place = place_of(rank)
    for number in range(ROUNDS):
        count = 1 + 400_000 * (1 + number % 5) + number
        tensor = place.full(count, rank.index + number)
        dist.all_reduce(tensor)
        same(tensor, total(rank) + (number - 1) * rank.size)
        del tensor
        place.empty_cache()
    return f"{ROUNDS} times"


def parts_of_tensors(rank: Rank) -> str:
    """Views that begin anywhere, and tensors that are not contiguous."""
    place = place_of(rank)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        for offset in (0, 1, 3, 7):
            whole = place.full(COUNT, 1, dtype)
            dist.all_reduce(whole[offset : offset + 1001])
            assert int(whole.eq(rank.size).sum()) == 1001, f"{dtype} from {offset}"
            assert int(whole.eq(1).sum()) == COUNT - 1001, "something beside it has changed"
    square = place.full(1000 * 1000, 1).view(1000, 1000).t()
    dist.all_reduce(square)
    same(square, rank.size)
    return ""


# ---- training


def _network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def _train(model: nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def _batches(rank: Rank) -> list[torch.Tensor]:
    """Return what all ranks together train on, in float64: sums have several orders."""
    seeded = torch.Generator().manual_seed(7)
    shape = (8 * rank.size, 32)
    device = place_of(rank).device
    return [torch.randn(shape, generator=seeded).double().to(device) for _ in range(4)]


def _as_one(rank: Rank, parameters: list[torch.Tensor]) -> str:
    """Compare with one process that trains on everything, and with the other ranks."""
    single = _network().double().to(place_of(rank).device)
    _train(single, _batches(rank))
    worst = max(
        float((mine.detach() - wanted.detach()).abs().max())
        for mine, wanted in zip(parameters, single.parameters(), strict=True)
    )
    assert worst < 1e-12, f"parameters differ by {worst:.1e} from those of one process"
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    others = [torch.empty_like(flat) for _ in range(rank.size)]
    dist.all_gather(others, flat)
    assert all(torch.equal(other, flat) for other in others), "ranks differ"
    return f"largest difference from one process {worst:.1e}"


def ddp(rank: Rank) -> str:
    model = _network().double().to(place_of(rank).device)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    _train(parallel, [batch.chunk(rank.size)[rank.index] for batch in _batches(rank)])
    return _as_one(rank, list(model.parameters()))


def fsdp(rank: Rank) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = copy.deepcopy(_network()).double().to(place_of(rank).device)
    mesh = init_device_mesh(place_of(rank).device.type, (rank.size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _train(model, [batch.chunk(rank.size)[rank.index] for batch in _batches(rank)])
    whole: list[Any] = list(model.parameters())
    return _as_one(rank, [parameter.full_tensor() for parameter in whole])


CHECKS: list[Check] = [
    in_the_current_stream, asynchronous, another_stream, futures, forgotten, barrier, coalesced,
    messages, subgroups, split, memory_comes_and_goes, parts_of_tensors, ddp, fsdp,
]  # fmt: skip
WITH_EXPANDABLE: list[Check] = [in_the_current_stream, memory_comes_and_goes, parts_of_tensors]


class Crew:
    """Ranks that are started anew after a check that failed: they may hang, or have no group."""

    def __init__(self, size: int, entry: Entry, *, fresh: bool = False) -> None:
        self._make = functools.partial(DeviceRanks, size, entry, fresh=fresh)
        self._ranks: DeviceRanks | None = None

    def run(self, check: Check, limit: float) -> tuple[bool, str]:
        try:
            if self._ranks is None:
                self._ranks = self._make().__enter__()
            return True, self._ranks(check, seconds=limit)[0]
        except Exception as error:  # noqa: BLE001  it goes into the table
            print(f"{check.__name__}: {error}", flush=True)
            if self._ranks is not None:
                self._ranks.abandon()
            self.leave()
            return False, last_line(error)

    def leave(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.__exit__(None, None, None)


def run_checks(crew: Crew, checks: list[Check], prefix: str, limit: float) -> Iterator[Row]:
    try:
        for check in checks:
            good, note = crew.run(check, limit)
            what = f"{prefix}: {check.__name__.replace('_', ' ')}"
            yield gpu.table.passed(what, note=note) if good else gpu.table.failed(what, note)
    finally:
        crew.leave()


def _with(size: int, settings: Settings) -> Iterator[Row]:
    crew = Crew(size, Entry(settings.kind, settings.library))
    yield from run_checks(crew, CHECKS, f"{size} ranks", settings.pick(40, 40, 40))


def _expandable(settings: Settings) -> Iterator[Row]:
    """In fresh processes: torch reads the variable early. On the simulated device: of chunks."""
    variables = {"PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE, "PYTORCH_ALLOC_CONF": EXPANDABLE}
    if settings.simulated:
        variables = {"RINGCOMM_SIM_CHUNK_BYTES": str(2 << 20)}
    with environment(**variables):
        crew = Crew(2, Entry(settings.kind, settings.library, variables), fresh=True)
        yield from run_checks(crew, WITH_EXPANDABLE, "expandable segments", 40)


def _device_id(settings: Settings) -> Iterator[Row]:
    """init_process_group(device_id=…): the ranks meet on the device at once."""
    entry = Entry(settings.kind, settings.library, with_device=not settings.simulated)
    crew = Crew(2, entry)
    yield from run_checks(crew, [in_the_current_stream, split], "device_id=", 40)


def _start(size: int, settings: Settings) -> Iterator[Row]:
    """How long a group takes from nothing to its first result."""
    with DeviceRanks(size, Entry(settings.kind, settings.library)) as ranks:
        seconds = ranks(_again, settings.kind, seconds=60)
    yield gpu.table.info(f"{size} ranks: a new group's first result", 1e3 * max(seconds), "ms")


def _again(rank: Rank, kind: str) -> float:
    """Return the median seconds for another group, once all is loaded."""
    times = []
    for _ in range(3):
        meet(rank)
        start = time.perf_counter()
        group = dist.new_group(timeout=timedelta(seconds=30))
        tensor = place_of(rank).full(1, 1)
        dist.all_reduce(tensor, group=group)
        same(tensor, rank.size)
        times.append(time.perf_counter() - start)
        dist.destroy_process_group(group)
    return statistics.median(times)


def checks(settings: Settings, size: int) -> Iterator[Row]:
    """Run everything; each check has a row."""
    preload_training()
    steps = [functools.partial(_with, size, settings)]
    if not settings.short:
        steps.append(functools.partial(_start, size, settings))
    if size == 2:  # more ranks would show no more
        more = [_expandable] if settings.short else [_expandable, _device_id]
        steps += [functools.partial(function, settings) for function in more]
    yield from parts(*steps)
