"""An all_reduce of codes between hosts, which the hooks and `quantized_all_reduce` are made of.

Inside a host numbers stay fp32: its ranks reduce_scatter them. The ranks of equal place on each
host then quantise, exchange by all_to_all, add up in fp32, quantise again and all_gather. So a byte
crosses the network once for all ranks of a host. All ranks decode the same codes, also those they
made themselves: the results are equal bit by bit.
"""

from __future__ import annotations

import functools
import hashlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringcomm._runtime import host
from ringcomm._runtime.backend import backend_of
from ringcomm.compression.codecs import UNIT, Codec, divide, mixed

# torch 2.13 has new names for them, and warns of the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

LEAST_PART = 1 << 20  # numbers: a shorter part costs more by its messages than it hides
MOST_PARTS = 4  # a tensor's: one is quantised while another one is under way
GREETING = 1  # in place of a hash of a compression: an exchange is made
Said = TypeVar("Said")
FAR = 2e-3  # seconds of a round: from here on messages cost more than parts hide


class Memory:
    """Remainders that codes of one tensor have left out: a rank's own, and of the sums it made."""

    def __init__(self) -> None:
        self.own: Tensor | None = None
        self.sums: list[Tensor] = []

    def fit(self, count: int, sums: list[int], device: torch.device) -> None:
        """Have as many numbers as the tensor and its parts; zeros where there are none yet."""
        if self.own is None or self.own.numel() != count:
            self.own = torch.zeros(count)
        if [part.numel() for part in self.sums] != sums:
            self.sums = [torch.zeros(part) for part in sums]
        self.own = self.own.to(device)  # which a checkpoint may not have known
        self.sums = [part.to(device) for part in self.sums]


class Compression(NamedTuple):
    """How one tensor is compressed; the same on all ranks, but for what `memory` holds."""

    codec: Codec
    divisor: float = 1
    memory: Memory | None = None
    seed: int | None = None  # numbers are rounded by chance


class Part:
    """A part of a tensor on its way."""

    def __init__(self, numbers: Tensor, first: int, ranks: int, rank: int, codec: Codec) -> None:
        units = -(-numbers.numel() // (UNIT * ranks))  # for each rank to add up
        self.numbers, self.first, self.share = numbers, first, units * UNIT
        begin = min(rank * self.share, numbers.numel())
        self.mine = numbers[begin : begin + self.share]
        self.first_of_mine = first + begin
        size = units * codec.unit_bytes
        self.codes, self.others = (
            torch.empty(ranks * size, dtype=torch.uint8, device=numbers.device) for _ in range(2)
        )
        self.sums = self.others[:size]  # its codes, once the others have been added up
        self.work: Any = None


def _gather(mine: Said, group: Any) -> list[Said]:
    """Return what each rank says. No rank takes it for a call of the program's own."""
    backends = [backend_of(group, device) for device in group._device_types]
    marked = [backend for backend in backends if hasattr(backend, "_set_codes")]
    every = [mine] * dist.get_world_size(group)
    try:
        for backend in marked:
            backend._set_codes(GREETING)
        if len(every) > 1:
            dist.all_gather_object(every, mine, group=group)
    finally:
        for backend in marked:
            backend._set_codes(0)
    return every


class Exchange:
    """The subgroups of a group, and a thread that runs what is asked for, one after another.

    All ranks of the group make it together, and ask for the same in the same order. `flat`
    quantises between all ranks, also those of one host. `asked` is what else all ranks give alike:
    they compare it here. It keeps its subgroups, and not the group.
    """

    def __init__(self, group: Any, *, flat: bool = False, **asked: object) -> None:
        ranks = dist.get_process_group_ranks(group)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this rank is not in the group: call on its ranks only")
        mine = host.key(rank), {"flat": flat, **asked}
        every = _gather(mine, group)
        for other, theirs in enumerate(every):
            if theirs[1] != mine[1]:
                raise ValueError(
                    f"rank {rank} asks for {mine[1]}, and rank {other} for {theirs[1]}"
                    ": give the same arguments on all ranks"
                )
        across, local = _places([host for host, _ in every], rank, flat=flat)
        self.across = _subgroup(group, [ranks[i] for i in across])
        self.local = _subgroup(group, [ranks[i] for i in local])
        self.parts = MOST_PARTS
        if self.across is not None and self._round(group) > FAR:
            self.parts = 1
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        weakref.finalize(self, self._jobs.put, None)

    def _round(self, group: Any) -> float:
        """Seconds of the fastest of three rounds of messages; all ranks return the slowest's."""
        times = []
        for _ in range(3):
            began = time.perf_counter()
            dist.barrier(self.across)
            times.append(time.perf_counter() - began)
        return max(_gather(min(times), group))

    def close(self) -> None:
        """End the thread and the subgroups, which end with torch.distributed otherwise.

        What is under way fails, and so do later calls.
        """
        self._jobs.put(None)
        for group in (self.across, self.local):
            if group is not None and group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)

    # ---- when it runs

    def submit(self, tensor: Tensor, how: Compression) -> torch.futures.Future[Any]:
        """Run `all_reduce` behind the caller's back: in a thread, or in a stream of the device."""
        if tensor.is_cuda:
            return self._on_stream(tensor, how)
        future: torch.futures.Future[Any] = torch.futures.Future()

        def job() -> None:
            try:
                self.all_reduce(tensor, how)
            except Exception as error:  # noqa: BLE001  it is raised where the future is waited for
                future.set_exception(error)
            else:
                future.set_result(tensor)

        if threading.current_thread() is self._thread:
            job()  # asked for by a callback of a job: this thread can't wait for itself
            return future
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._jobs,), name="ringcomm-exchange", daemon=True
            )
            ask_to_end = functools.partial(self._jobs.put, None)
            self._thread.ends_with_groups = ask_to_end  # type: ignore[attr-defined]  # exit.py
            self._thread.start()
        self._jobs.put(job)
        return future

    def _on_stream(self, tensor: Tensor, how: Compression) -> torch.futures.Future[Any]:
        """The host enqueues everything and goes on: no thread is needed for that."""
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[tensor.device])
        stream = self._streams.get(tensor.device) or torch.cuda.Stream(tensor.device)
        self._streams[tensor.device] = stream
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            tensor.record_stream(stream)
            self.all_reduce(tensor, how)
            future.set_result(tensor)
        return future

    # ---- what it does

    def all_reduce(self, tensor: Tensor, how: Compression) -> None:
        """Replace the tensor, contiguous and of any float type, by the sum over the divisor."""
        self._compare(tensor, how)
        flat = tensor.view(-1)
        numbers = flat if flat.dtype == torch.float32 else flat.float()
        if self.local is not None:
            self._inside_hosts(numbers, how)
        elif self.across is not None:
            self._between_hosts(numbers, how)
        else:
            divide(numbers, how.divisor)
        if numbers is not flat:
            flat.copy_(numbers)

    def _compare(self, tensor: Tensor, how: Compression) -> None:
        """Have the ranks compare what they give: the exchange itself is of bytes, or padded."""
        given = repr((how.codec.name, how.divisor, tensor.dtype, tensor.numel()))
        digest = hashlib.blake2b(given.encode(), digest_size=8).digest()
        for group in (self.local, self.across):
            if group is None:
                continue
            backend = backend_of(group, tensor.device)
            if hasattr(backend, "_set_codes"):  # its collectives compare it: no message more
                backend._set_codes(int.from_bytes(digest, "little") | 1)
            elif tensor.device.type == "cpu":
                mine = torch.tensor(list(digest))
                every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
                dist.all_gather(every, mine, group=group)
                if not all(theirs.equal(mine) for theirs in every):
                    raise RuntimeError(
                        f"a quantized all_reduce differs between ranks, here it is one of {given}:"
                        " give the same format, op, dtype and number of elements on all ranks"
                    )

    def _inside_hosts(self, numbers: Tensor, how: Compression) -> None:
        size = dist.get_world_size(self.local)
        share = -(-numbers.numel() // (size * UNIT)) * UNIT
        whole = numbers.new_zeros(size * share)
        whole[: numbers.numel()] = numbers
        mine = numbers.new_empty(share)
        reduce_scatter_single(mine, whole, group=self.local)
        if self.across is None:
            divide(mine, how.divisor)
        elif how.divisor == 1:
            self._between_hosts(mine, how)
        else:  # the host's mean: fp16 may have no room for its sum
            divide(mine, size)
            self._between_hosts(mine, how._replace(divisor=how.divisor / size))
        all_gather_single(whole, mine, group=self.local)
        numbers.copy_(whole[: numbers.numel()])

    def _between_hosts(self, numbers: Tensor, how: Compression) -> None:
        """Move part after part, each a step behind the one before it."""
        size, rank = dist.get_world_size(self.across), dist.get_rank(self.across)
        length = max(LEAST_PART, -(-numbers.numel() // self.parts))
        length = -(-length // (UNIT * size)) * UNIT * size
        parts = [
            Part(numbers[first : first + length], first, size, rank, how.codec)
            for first in range(0, numbers.numel(), length)
        ]
        if how.memory is not None:
            sums = [part.mine.numel() for part in parts]
            how.memory.fit(numbers.numel(), sums, numbers.device)
        for step in range(len(parts) + 2):
            if step < len(parts):
                self._scatter(parts[step], how, rank)
            if 0 <= step - 1 < len(parts):
                self._add_up(parts[step - 1], step - 1, how, size)
            if 0 <= step - 2 < len(parts):
                part = parts[step - 2]
                part.work.wait()
                how.codec.decode(part.codes, part.numbers)

    def _scatter(self, part: Part, how: Compression, rank: int) -> None:
        seed = None if how.seed is None else mixed(how.seed, 1, rank)
        own = None
        if how.memory is not None and how.memory.own is not None:
            own = how.memory.own[part.first : part.first + part.numbers.numel()]
        how.codec.encode(part.numbers, part.codes, own, seed, part.first)
        part.work = dist.all_to_all_single(
            part.others, part.codes, group=self.across, async_op=True
        )

    def _add_up(self, part: Part, index: int, how: Compression, size: int) -> None:
        part.work.wait()
        total = part.numbers.new_empty(part.mine.numel())
        how.codec.decode(part.others, total, size, how.divisor)
        seed = None if how.seed is None else mixed(how.seed, 2)
        memory = None if how.memory is None else how.memory.sums[index]
        how.codec.encode(total, part.sums, memory, seed, part.first_of_mine)
        part.work = all_gather_single(part.codes, part.sums, group=self.across, async_op=True)


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # with what it holds


def _places(hosts: list[str], rank: int, *, flat: bool) -> tuple[list[int], list[int]]:
    """Return the ranks with which this one exchanges codes, and those of its host.

    Where hosts have different numbers of ranks, all ranks exchange codes.
    """
    of_host: dict[str, list[int]] = {}
    for index, key in enumerate(hosts):
        of_host.setdefault(key, []).append(index)
    if flat or len({len(ranks) for ranks in of_host.values()}) > 1:
        return list(range(len(hosts))), [rank]
    local = of_host[hosts[rank]]
    place = local.index(rank)
    return [ranks[place] for ranks in of_host.values()], local


def _subgroup(group: Any, ranks: list[int]) -> Any:
    """Make a group of some ranks of `group`, with the same backend and options; None for one."""
    if len(ranks) < 2:
        return None
    device = torch.device(next(iter(group._device_types)))
    options: Any = getattr(backend_of(group, device), "options", None)
    if not hasattr(options, "_links"):
        return dist.new_group(ranks, use_local_synchronization=True)
    options._links = options._check_members = None  # an elastic world's: they make its own groups
    return dist.new_group(
        ranks,
        timeout=options._timeout,
        backend=dist.get_backend_config(group),
        pg_options=options,
        use_local_synchronization=True,
    )
