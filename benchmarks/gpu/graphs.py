"""Operations captured into CUDA graphs: the bits of eager calls, and the host's time that it saves.

Through torch's public functions alone: `torch.cuda.graph` around calls of torch.distributed. Each
operation runs a few times before it is captured, as for any backend. Tensors that a graph uses stay
where they are; new values are copied into them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import gpu.table
from gpu.behaviour import Check, Crew, run_checks, same, total
from gpu.ranks import DeviceRanks, Entry, meet, place_of
from gpu.stages import Settings, last_line, parts
from gpu.table import Row
from lab.ranks import Rank
from ringcomm.tools.bench.cases import all_gather_single, reduce_scatter_single

COUNT = 100_003
SMALL = 256  # elements: 1 KiB
IN_ONE_GRAPH = 100  # small operations
REPLAYS = 1000
FEW = 20
SHARE = 0.5  # a replay should take at most so much of the eager time
WARM = 3

Call = Callable[[torch.Tensor, torch.Tensor], Any]


class Captured:
    """A call with the tensors that it reads and writes, as a graph and as a function."""

    def __init__(self, rank: Rank, call: Call, given: int, result: int) -> None:
        place = place_of(rank)
        self._call = call
        self.given, self.result = place.full(given, 0), place.full(result, 0)
        self._eagerly = place.full(given, 0), place.full(result, 0)
        for _ in range(WARM):
            call(self.given, self.result)
            call(*self._eagerly)
        meet(rank)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            call(self.given, self.result)

    def replay(self, values: torch.Tensor) -> torch.Tensor:
        """Return the result, which the next replay overwrites."""
        self.given.copy_(values)
        self._graph.replay()
        return self.result

    def eager(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the call itself gives; also overwritten by the next."""
        given, result = self._eagerly
        given.copy_(values)
        self._call(given, result)
        return result


def all_reduce(given: torch.Tensor, result: torch.Tensor) -> None:
    result.copy_(given)
    dist.all_reduce(result)


def broadcast(given: torch.Tensor, result: torch.Tensor) -> None:
    result.copy_(given)
    dist.broadcast(result, 0)


def all_gather(given: torch.Tensor, result: torch.Tensor) -> None:
    all_gather_single(result, given)


def reduce_scatter(given: torch.Tensor, result: torch.Tensor) -> None:
    reduce_scatter_single(result, given)


def all_to_all(given: torch.Tensor, result: torch.Tensor) -> None:
    dist.all_to_all_single(result, given)


def differing(result: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return how many elements differ in a bit, on the device: the host waits for nothing."""
    return result.view(torch.int32).ne(other.view(torch.int32)).sum()


def seeded(rank: Rank) -> torch.Generator:
    return torch.Generator(place_of(rank).device).manual_seed(100 + rank.index)


def none_wrong(wrong: torch.Tensor, of: str) -> None:
    assert int(wrong) == 0, f"{int(wrong)} elements of {of} are not as in an eager call"


def as_eager(rank: Rank, call: Call, given: int, result: int, replays: int) -> str:
    """Each replay gets new values; its result is compared with that of an eager call, by bits.

    Replays follow one another in batches, after the eager calls of the same values.
    """
    captured, generator = Captured(rank, call, given, result), seeded(rank)
    batch = 10
    values = torch.empty(batch, given, device=place_of(rank).device)
    wanted = torch.empty(batch, result, device=place_of(rank).device)
    wrong = torch.zeros((), dtype=torch.int64, device=place_of(rank).device)
    for _ in range(replays // batch):
        values.normal_(generator=generator)
        for row, to in zip(values, wanted, strict=True):
            to.copy_(captured.eager(row))
        for row, expected in zip(values, wanted, strict=True):
            wrong += differing(captured.replay(row), expected)
    none_wrong(wrong, f"{replays} replays")
    return f"{replays} replays"


def many_replays(rank: Rank) -> str:
    return as_eager(rank, all_reduce, COUNT, COUNT, REPLAYS)


def captured_broadcast(rank: Rank) -> str:
    return as_eager(rank, broadcast, COUNT, COUNT, FEW)


def captured_all_gather(rank: Rank) -> str:
    return as_eager(rank, all_gather, COUNT, COUNT * rank.size, FEW)


def captured_reduce_scatter(rank: Rank) -> str:
    return as_eager(rank, reduce_scatter, COUNT * rank.size, COUNT, FEW)


def captured_all_to_all(rank: Rank) -> str:
    return as_eager(rank, all_to_all, COUNT * rank.size, COUNT * rank.size, FEW)


def large_tensors(rank: Rank) -> str:
    """64 MiB: more than a rank's window holds."""
    return as_eager(rank, all_reduce, 16 << 20, 16 << 20, FEW)


def mixed_with_eager_calls(rank: Rank) -> str:
    """Two graphs, eager calls and other collectives by turns, with no wait by the host between."""
    place, generator = place_of(rank), seeded(rank)
    small = Captured(rank, all_reduce, SMALL, SMALL)
    large = Captured(rank, all_reduce, COUNT, COUNT)
    others = place.full(SMALL * rank.size, 0)
    wrong = torch.zeros((), dtype=torch.int64, device=place.device)
    for number in range(200):
        for graph in (small, large) if number % 3 else (large, small):
            values = torch.empty_like(graph.given).normal_(generator=generator)
            if number % 2:
                wanted = graph.eager(values).clone()
                got = graph.replay(values)
            else:
                got = graph.replay(values).clone()
                wanted = graph.eager(values)
            wrong += differing(got, wanted)
        if number % 5 == 0:
            all_gather_single(others, small.result)
        if number % 7 == 0:
            dist.all_reduce(others, async_op=True).wait()
        if number % 50 == 0:
            dist.barrier()
    none_wrong(wrong, "400 replays")
    return "400 replays of two graphs"


def messages_are_refused(rank: Rank) -> str:
    """A message cannot be captured. The call says so, and the group goes on."""
    place, after = place_of(rank), (rank.index + 1) % rank.size
    before = (rank.index - 1) % rank.size
    mine, other = place.full(SMALL, rank.index), place.full(SMALL, 0)
    said = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, other, before)]
            ):
                work.wait()
    except Exception as error:  # noqa: BLE001  what it is, is the question
        said = last_line(error)
    assert "captur" in said, said or "it was captured"
    again = place.full(SMALL, rank.index + 1)
    dist.all_reduce(again)
    same(again, total(rank))
    return said


def time_small(rank: Rank) -> tuple[float, float]:
    """Return seconds of 100 small all_reduces: eager, and as one graph; the best of some."""
    place = place_of(rank)
    tensor = place.full(SMALL, 0)

    def enqueue() -> None:
        for _ in range(IN_ONE_GRAPH):
            dist.all_reduce(tensor)

    enqueue()
    meet(rank)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    times: list[tuple[float, float]] = []
    for _ in range(FEW):
        meet(rank)
        eager = place.seconds(enqueue)
        meet(rank)
        times.append((eager, place.seconds(graph.replay)))
    return min(eager for eager, _ in times), min(replayed for _, replayed in times)


def speed(size: int, settings: Settings) -> Iterator[Row]:
    """Compare a replay with eager calls: launches are what small operations cost most."""
    with DeviceRanks(size, Entry(settings.kind, settings.library)) as ranks:
        times = ranks(time_small, seconds=60)
    eager, replayed = (max(figures) for figures in zip(*times, strict=True))
    yield row_of(size, eager, replayed)


def row_of(size: int, eager: float, replayed: float) -> Row:
    what = f"{size} ranks: {IN_ONE_GRAPH} all_reduces of 1 KiB in a graph, of their eager time"
    note = f"{1e6 * replayed / IN_ONE_GRAPH:.1f} µs each, eager {1e6 * eager / IN_ONE_GRAPH:.1f} µs"
    return gpu.table.aim(gpu.table.at_most(SHARE, what, replayed / eager, "", note))


CHECKS: list[Check] = [
    many_replays, mixed_with_eager_calls, captured_broadcast, captured_all_gather,
    captured_reduce_scatter, captured_all_to_all, large_tensors, messages_are_refused,
]  # fmt: skip


def graphs(settings: Settings, size: int) -> Iterator[Row]:
    """Capture everything that can be; each check has a row."""
    if settings.simulated:
        yield gpu.table.info("CUDA graphs", note="not run: torch captures streams of a GPU only")
        return
    crew = Crew(size, Entry(settings.kind, settings.library))
    yield from run_checks(crew, CHECKS, f"{size} ranks", 40)
    yield from parts(functools.partial(speed, size, settings))
