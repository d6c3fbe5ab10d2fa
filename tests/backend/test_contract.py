"""The rest of what torch.distributed asks of a backend: sparse sums, hooks, callbacks, records."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lab.oracle import bits, values
from lab.ranks import Rank, Ranks, error_of


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    some = Ranks(request.param)
    yield some
    some.leave()


def backend_of(group: Any = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


# ---- sparse tensors


def check_sparse(rank: Rank) -> list[str]:
    digests = []
    for number, sizes in enumerate([(7,), (4, 6), (3, 4, 5), (2, 3, 1, 4), (0, 3)]):
        count = int(torch.Size(sizes).numel())
        dense = [
            values(other, count, torch.float64, number).view(sizes) for other in range(rank.size)
        ]
        dense = [tensor * tensor.gt(0.3 * other) for other, tensor in enumerate(dense)]
        for dims in range(1, len(sizes) + 1):
            for dtype in (torch.float32, torch.int64, torch.bfloat16):
                parts = [tensor.to(dtype) for tensor in dense]
                for is_async in (False, True):
                    tensor = parts[rank.index].to_sparse(dims)
                    work = dist.all_reduce(tensor, async_op=is_async)
                    if is_async:
                        work.wait()
                        assert work.result()[0] is not None
                    torch.testing.assert_close(tensor.to_dense(), torch.stack(parts).sum(0))
                    assert tensor.is_coalesced()
                    digests.append(bits(tensor.values()))
    average = torch.eye(4).mul(rank.index).to_sparse()
    dist.all_reduce(average, dist.ReduceOp.AVG)
    torch.testing.assert_close(average.to_dense(), torch.eye(4) * (rank.size - 1) / 2)
    nothing = torch.zeros(5, 5).to_sparse()
    dist.all_reduce(nothing)
    assert nothing._nnz() == 0
    return digests


def test_sparse_all_reduce(ranks: Ranks) -> None:
    answers = ranks(check_sparse)
    assert all(answer == answers[0] for answer in answers)


def check_sparse_among_others(rank: Rank) -> None:
    """Its three rounds stay together, whatever else is asked for at the same time."""
    works, sparse, dense = [], [], []
    for i in range(10):
        sparse.append(torch.eye(50).to_sparse())
        dense.append(torch.ones(1000 * i + 1))
        works.append(dist.all_reduce(sparse[-1], async_op=True))
        works.append(dist.all_reduce(dense[-1], async_op=True))
    for work in reversed(works):
        work.wait()
    for tensor in sparse:
        assert tensor.to_dense().equal(torch.eye(50) * rank.size)
    assert all(tensor.eq(rank.size).all() for tensor in dense)


def test_sparse_among_others(ranks: Ranks) -> None:
    ranks(check_sparse_among_others)


def train_embedding(rank: Rank) -> list[str]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.EmbeddingBag(100, 8, sparse=True, mode="sum"), nn.Linear(8, 2))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        words = torch.randint(0, 100, (6, 5), generator=torch.Generator().manual_seed(
            100 * step + rank.index))  # fmt: skip
        model(words).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [bits(parameter) for parameter in module.parameters()]


def test_ddp_with_sparse_gradients() -> None:
    ours, gloos = Ranks(2), Ranks(2, "gloo")
    try:
        assert ours(train_embedding) == gloos(train_embedding)
        ours.leave()
    finally:
        ours.kill()
        gloos.kill()


# ---- callbacks and hooks


def check_blocking_callbacks(rank: Rank) -> None:
    """A callback may wait for operations, and those for callbacks that wait."""
    seen: list[float] = []

    def sum_again(done: Any) -> Any:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        seen.append(tensor[0].item())
        return done.value()

    for waited_by_work in (False, True):
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        future = work.get_future().then(sum_again).then(sum_again)
        if waited_by_work:
            work.wait()
        future.wait()
    assert seen == [rank.size] * 4


def test_a_callback_may_block(ranks: Ranks) -> None:
    ranks(check_blocking_callbacks)


def check_completion_hook(rank: Rank) -> None:
    group = dist.new_group()
    infos: list[Any] = []
    assert not group._has_hooks()
    group._register_on_completion_hook(infos.append)
    assert group._has_hooks()
    for size in (3, 30_000):
        dist.all_reduce(torch.ones(size), group=group)
        dist.broadcast(torch.ones(size), dist.get_global_rank(group, 0), group, async_op=True)
    group._wait_for_pending_works()
    infos.sort(key=lambda info: info.seq)  # several threads may end works
    kinds = [str(info.op_type).rpartition(".")[2] for info in infos]
    assert kinds == ["ALLREDUCE", "BROADCAST"] * 2
    assert [info.seq for info in infos] == [1, 2, 3, 4]
    assert all(info.active_duration > timedelta(0) for info in infos)
    kind, text = error_of(lambda: group._register_on_completion_hook(infos.append))
    assert (kind, "already" in text) == ("RuntimeError", True)
    dist.destroy_process_group(group)


def test_completion_hooks(ranks: Ranks) -> None:
    ranks(check_completion_hook)


def check_threads(rank: Rank) -> None:
    """Several threads, a group each: whose calls come in another order on every rank."""
    groups = [dist.new_group() for _ in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(50):
                tensor = torch.full((1 + 37 * i,), number + 1.0)
                dist.all_reduce(tensor, group=groups[number], async_op=i % 2 == 0) or tensor
                dist.barrier(groups[number])
                assert tensor.eq((number + 1) * rank.size).all()
        except BaseException as error:  # noqa: BLE001  it is another thread's
            failures.append(error)

    order = [(number + rank.index) % 4 for number in range(4)]
    threads = [threading.Thread(target=work, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for group in groups:
        dist.destroy_process_group(group)


def test_threads(ranks: Ranks) -> None:
    ranks(check_threads)


# ---- memory


def overlapping(rank: Rank) -> list[tuple[str, Any]]:
    n, me = rank.size, rank.index
    whole = torch.ones(n * 4)
    parts = list(whole.chunk(n))
    shifted = [whole[max(0, 4 * i - 1) : max(0, 4 * i - 1) + 4] for i in range(n)]
    return [
        ("partly the same", lambda: dist.all_gather(shifted, torch.ones(4))),
        ("input in another's place", lambda: dist.all_gather(parts, parts[(me + 1) % n])),
        ("into", lambda: dist.all_gather_into_tensor(whole, parts[(me + 1) % n])),
        ("scatter", lambda: dist.reduce_scatter_tensor(parts[(me + 1) % n], whole)),
        ("exchange", lambda: dist.all_to_all_single(whole, whole)),
        ("lists", lambda: dist.all_to_all(parts, parts)),
    ]


def check_overlaps(rank: Rank) -> list[tuple[str, str, str]]:
    errors = [(name, *error_of(call)) for name, call in overlapping(rank)]
    # Each rank's own part may be in its own place.
    n, me = rank.size, rank.index
    whole = torch.full((n * 300_000,), -1.0)
    parts = list(whole.chunk(n))
    parts[me].fill_(me)
    dist.all_gather_into_tensor(whole, parts[me])
    dist.all_gather(parts, parts[me])
    assert all(part.eq(other).all() for other, part in enumerate(parts))
    dist.reduce_scatter_tensor(parts[me], whole)
    assert parts[me].eq(me * n).all()
    assert parts[(me + 1) % n].eq((me + 1) % n).all()
    dist.all_gather([torch.empty(5) for _ in range(n)], torch.ones(1).expand(5))  # read only
    return errors


def test_outputs_that_overlap_are_refused(ranks: Ranks) -> None:
    for errors in ranks(check_overlaps):
        for name, kind, text in errors:
            assert kind == "RuntimeError", f"{name}: {kind} {text}"
            assert "memory" in text, f"{name}: {text}"


def check_lazy_bits(rank: Rank) -> None:
    """Conjugate and negative views hold other bits than their values; as inputs, values travel."""
    n, me = rank.size, rank.index
    plain = [torch.complex(torch.arange(6.0) + r, torch.ones(6) * (r + 1)).conj() for r in range(n)]
    outs = [torch.zeros(6, dtype=torch.complex64) for _ in range(n)]
    backend_of().allgather([outs], [plain[me]]).wait()  # all_gather itself refuses them
    assert all(map(torch.equal, outs, plain))

    lazy, wanted = plain[me].imag, [p.imag.clone() for p in plain]
    assert lazy.is_neg()
    parts, out = [torch.zeros(6) for _ in range(n)], torch.zeros(6)
    dist.all_gather(parts, lazy)
    assert all(map(torch.equal, parts, wanted))
    part, flat = torch.zeros(6 // n), torch.zeros(6 * n)
    dist.all_gather_into_tensor(flat, lazy)
    assert flat.equal(torch.cat(wanted))
    dist.reduce_scatter_tensor(part, lazy)
    assert part.equal(torch.stack(wanted).sum(0).chunk(n)[me])
    dist.all_to_all_single(out, lazy)
    assert out.equal(torch.cat([w.chunk(n)[me] for w in wanted]))
    dist.broadcast(lazy if me == 0 else out, 0)
    assert me == 0 or out.equal(wanted[0])
    dist.scatter(out, [lazy] * n if me == 1 else None, 1)
    assert out.equal(wanted[1])
    if me == 0:
        dist.send(lazy, 1)
    elif me == 1:
        dist.recv(out, 0)
        assert out.equal(wanted[0])


def test_conjugate_and_negative_views(ranks: Ranks) -> None:
    ranks(check_lazy_bits)


# ---- what a group did


def check_record(rank: Rank) -> None:
    group = dist.new_group()
    backend = backend_of(group)
    assert backend.flight_record() == []
    before = time.time()
    for i in range(4200):
        dist.all_reduce(torch.ones(1 + i), group=group)
    if rank.index == 0:
        dist.send(torch.ones(5), dist.get_global_rank(group, 1), group, tag=7)
    elif rank.index == 1:
        dist.recv(torch.ones(5), dist.get_global_rank(group, 0), group, tag=7)
    record = backend.flight_record()
    assert len(record) == 4096
    assert all(entry["state"] == "done" for entry in record)
    assert all(before - 1 < entry["began"] < time.time() + 1 for entry in record)
    assert all(0 < entry["seconds"] < 10 for entry in record)
    last = record[-2] if rank.index < 2 else record[-1]
    assert last["operation"] == "all_reduce float32[4200] SUM"
    assert last["sequence"] == 4200
    if rank.index < 2:
        other = ("send", "to rank 1") if rank.index == 0 else ("recv", "from rank 0")
        assert record[-1]["operation"] == f"{other[0]} float32[5] tag 7 {other[1]}"
    if rank.index == 0:  # which begins before the others
        works = [dist.all_reduce(torch.ones(n), group=group, async_op=True) for n in (1, 2, 3)]
        while backend.flight_record()[-3]["state"] == "queued":
            time.sleep(0.001)
        states = [(entry["sequence"], entry["state"]) for entry in backend.flight_record()[-3:]]
        assert states == [(4201, "running"), (4202, "queued"), (4203, "queued")]
        dist.send(torch.ones(1), 1)
    else:
        if rank.index == 1:
            dist.recv(torch.ones(1), 0)
        works = [dist.all_reduce(torch.ones(n), group=group, async_op=True) for n in (1, 2, 3)]
    for work in works:
        work.wait()
    dist.destroy_process_group(group)


def test_flight_record(ranks: Ranks) -> None:
    ranks(check_record)


FIRST = """
import os, sys, tempfile, torch, torch.distributed as dist, ringcomm
store = tempfile.mktemp()
child = os.fork()
rank = 0 if child else 1
dist.init_process_group("ringcomm", init_method=f"file://{store}", rank=rank, world_size=2)
for _ in range(3):
    dist.all_reduce(torch.ones(1000))
dist.destroy_process_group()
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(("algorithm", "name", "why"), [
    (None, "direct", "all_reduce, any size, mapped windows"),
    ("ring", "ring", "the algorithm that was asked for"),
])  # fmt: skip
def test_one_line_at_the_first_operation(
    python: Run, algorithm: str | None, name: str, why: str
) -> None:
    env = {"RINGCOMM_ALGORITHM": algorithm, "RINGCOMM_TRANSPORT": None}
    result = python(FIRST, RINGCOMM_LOG="info", **env)
    assert sorted(result.stderr.splitlines()) == [
        f"ringcomm INFO rank {rank} of group '0': first operation: all_reduce #1 float32[1000] "
        f"SUM, {name} ({why}), over shared memory between 2 ranks"
        for rank in range(2)
    ]
    assert python(FIRST, RINGCOMM_LOG="warning").stderr == ""
    assert python(FIRST).stderr == ""
