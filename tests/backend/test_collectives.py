"""Every collective, type and reduction against an oracle; bitwise equal across ranks and runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import OVER_TCP
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab import oracle
from lab.oracle import bits, values
from lab.ranks import Rank, Ranks, join

# Around what changes how a message travels: a cache line, one hop, segments, several segments.
SIZES = [0, 1, 3, 28, 29, 1000, 4097, 65537, 300_001]
FEW = [0, 1, 3, 1000, 10007]


@pytest.fixture(
    scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    some = Ranks(request.param)
    yield some
    some.leave()


def same_everywhere(answers: list[Any]) -> None:
    assert all(answer == answers[0] for answer in answers), "ranks hold different results"


# ---- reductions


def all_reduce(rank: Rank, tensor: torch.Tensor, op: Any, *, is_async: bool) -> torch.Tensor:
    result = tensor.clone()
    work = dist.all_reduce(result, op, async_op=is_async)
    if is_async:
        work.wait()
    return result


def reduce_to_each(rank: Rank, tensor: torch.Tensor, op: Any, *, is_async: bool) -> torch.Tensor:
    kept = tensor
    for root in range(rank.size):
        result = tensor.clone()
        work = dist.reduce(result, root, op, async_op=is_async)
        if is_async:
            work.wait()
        if rank.index == root:
            kept = result
        else:
            assert bits(result) == bits(tensor), "a reduce changed the tensor of another rank"
    return kept


def reduce_scattered(rank: Rank, tensor: torch.Tensor, op: Any, *, is_async: bool) -> torch.Tensor:
    """In shards of unequal size, put together again."""
    count = tensor.numel()
    cuts = [count * r * r // rank.size**2 for r in range(rank.size + 1)]
    shards = [tensor[a:b].clone() for a, b in itertools.pairwise(cuts)]
    mine = torch.empty_like(shards[rank.index])
    work = dist.reduce_scatter(mine, shards, op, async_op=is_async)
    if is_async:
        work.wait()
    gathered = [torch.empty_like(shard) for shard in shards]
    dist.all_gather(gathered, mine)
    return torch.cat(gathered)


def reduce_scattered_tensor(
    rank: Rank, tensor: torch.Tensor, op: Any, *, is_async: bool
) -> torch.Tensor:
    count = tensor.numel() // rank.size * rank.size
    mine = torch.empty(count // rank.size, dtype=tensor.dtype)
    whole = tensor[:count].clone()
    work = dist.reduce_scatter_tensor(mine, whole, op, async_op=is_async)
    if is_async:
        work.wait()
    result = torch.empty(count, dtype=tensor.dtype)
    dist.all_gather_into_tensor(result, mine)
    return torch.cat([result, tensor[count:]])


REDUCTIONS = [all_reduce, reduce_to_each, reduce_scattered, reduce_scattered_tensor]


def check_reductions(
    rank: Rank, function: Callable[..., torch.Tensor], cases: list[tuple[torch.dtype, str, int]]
) -> list[str]:
    digests = []
    for number, (dtype, name, count) in enumerate(cases):
        inputs = [values(other, count, dtype, number) for other in range(rank.size)]
        if dtype.is_complex and name not in ("SUM", "AVG"):
            continue
        op = oracle.reduce_op(name, rank.index)
        runs = [
            function(rank, inputs[rank.index], op, is_async=is_async) for is_async in (False, True)
        ]
        what = f"{function.__name__} {dtype}[{count}] {name} of {rank.size} ranks"
        assert bits(runs[0]) == bits(runs[1]), f"{what}: two runs differ"
        checked = count
        if function is reduce_scattered_tensor:
            checked = count // rank.size * rank.size
        if function is not reduce_to_each or rank.index == 0:
            parts = [tensor[:checked] for tensor in inputs]
            oracle.check_reduced(runs[0][:checked], parts, name, what)
        # Every root of a reduction holds a copy of its own, which must be the same.
        digests.append(bits(runs[0][:checked]))
    return digests


@pytest.mark.parametrize("function", REDUCTIONS)
def test_every_type_and_op(ranks: Ranks, function: Callable[..., torch.Tensor]) -> None:
    cases = [
        (dtype, op, count)
        for dtype in oracle.DTYPES
        for op in oracle.ops_of(dtype)
        for count in FEW
    ]
    if function is not all_reduce:
        cases = cases[:: 3 if function is reduce_scattered else 5]
    same_everywhere(ranks(check_reductions, function, cases))


@pytest.mark.parametrize("function", REDUCTIONS)
def test_every_size(ranks: Ranks, function: Callable[..., torch.Tensor]) -> None:
    cases = [
        (dtype, op, count)
        for dtype, op in [(torch.float32, "SUM"), (torch.bfloat16, "AVG"), (torch.int8, "BXOR")]
        for count in SIZES
    ]
    answers = ranks(check_reductions, function, cases)
    if not (OVER_TCP and function is reduce_to_each):  # a tree adds in the order of its root
        same_everywhere(answers)


def check_nan(rank: Rank) -> None:
    for dtype in oracle.FLOATS + oracle.FLOAT8:
        for name in ("MIN", "MAX", "SUM"):
            tensor = torch.ones(100).to(dtype)
            if rank.index == rank.size - 1:
                tensor[17] = float("nan")
            dist.all_reduce(tensor, oracle.reduce_op(name, rank.index))
            assert tensor.float().isnan().nonzero().flatten().tolist() == [17], (dtype, name)


def test_nan_propagates(ranks: Ranks) -> None:
    ranks(check_nan)


def check_algorithm(rank: Rank, algorithm: str) -> list[str]:
    import ringcomm

    options = ringcomm.Options()
    options.algorithm = algorithm
    group = dist.new_group(pg_options=options)
    digests = []
    for count in SIZES:
        inputs = [values(other, count, torch.float32, 7) for other in range(rank.size)]
        result = inputs[rank.index].clone()
        dist.all_reduce(result, group=group)
        oracle.check_reduced(result, inputs, "SUM", f"{algorithm} all_reduce[{count}]")
        shards = [torch.empty_like(result) for _ in inputs]
        dist.all_gather(shards, inputs[rank.index], group=group)
        root = count % rank.size
        sent = inputs[root].clone() if rank.index == root else torch.empty(count)
        dist.broadcast(sent, root, group=group)
        received = torch.empty(count)
        dist.scatter(received, inputs if rank.index == root else None, root, group=group)
        assert bits(received) == bits(inputs[rank.index])
        digests += [bits(tensor) for tensor in [result, *shards, sent]]
        assert digests[-1 - rank.size : -1] == [bits(tensor) for tensor in inputs]
        assert digests[-1] == bits(inputs[root])
    dist.destroy_process_group(group)
    return digests


@pytest.mark.parametrize("algorithm", ["direct", "ring", "tree"])
def test_an_algorithm_by_option(ranks: Ranks, algorithm: str) -> None:
    same_everywhere(ranks(check_algorithm, algorithm))


# ---- bytes that only move


def check_moves(rank: Rank, dtype: torch.dtype, count: int) -> None:
    n, me = rank.size, rank.index
    inputs = [oracle.raw(other, count, dtype) for other in range(n)]
    expected, empty = [bits(tensor) for tensor in inputs], torch.empty_like

    def check(what: str, tensors: list[torch.Tensor], wanted: list[str]) -> None:
        assert [bits(tensor) for tensor in tensors] == wanted, f"{what} {dtype}[{count}]"

    outputs = [empty(tensor) for tensor in inputs]
    dist.all_gather(outputs, inputs[me])
    check("all_gather", outputs, expected)
    whole = torch.empty(n * inputs[0].numel(), dtype=dtype)
    dist.all_gather_into_tensor(whole, inputs[me])
    check("all_gather_into_tensor", list(whole.chunk(n)) if whole.numel() else inputs, expected)
    for root in range(n):
        sent = inputs[root].clone() if me == root else empty(inputs[root])
        dist.broadcast(sent, root)
        check("broadcast", [sent], [expected[root]])
        outputs = [empty(tensor) for tensor in inputs]
        dist.gather(inputs[me], outputs if me == root else None, root)
        if me == root:
            check("gather", outputs, expected)
        received = empty(inputs[me])
        dist.scatter(received, inputs if me == root else None, root)
        check("scatter", [received], [expected[me]])
    outputs = [empty(tensor) for tensor in inputs]
    dist.all_to_all(outputs, [inputs[(me + other) % n] for other in range(n)])
    check("all_to_all", outputs, [expected[(other + me) % n] for other in range(n)])


def check_all_moves(rank: Rank, cases: list[tuple[torch.dtype, int]]) -> None:
    for dtype, count in cases:
        check_moves(rank, dtype, count)


def test_every_type_moves(ranks: Ranks) -> None:
    dtypes = oracle.DTYPES + oracle.MOVED
    ranks(check_all_moves, [(dtype, count) for dtype in dtypes for count in (0, 3, 1201)])
    ranks(check_all_moves, [(torch.float32, size) for size in SIZES])
    if ranks.size == 2:  # past the caches, as far as they are 32 MiB or smaller
        ranks(check_all_moves, [(torch.uint8, 9_000_001)])


def check_splits(rank: Rank, rows: list[list[int]], columns: int) -> None:
    """rows[i][j] rows go from rank i to rank j."""
    n, me = rank.size, rank.index

    def block(i: int, j: int) -> torch.Tensor:
        return values(i * n + j, rows[i][j] * columns, torch.float32)

    sent = [block(me, other) for other in range(n)]
    wanted = [block(other, me) for other in range(n)]
    give, take = rows[me], [rows[other][me] for other in range(n)]
    output = torch.empty(sum(take), columns)
    dist.all_to_all_single(output, torch.cat(sent).view(-1, columns), take, give)
    assert bits(output) == bits(torch.cat(wanted))
    outputs = [torch.empty_like(tensor) for tensor in wanted]
    dist.all_to_all(outputs, sent, async_op=True).wait()
    assert [bits(tensor) for tensor in outputs] == [bits(tensor) for tensor in wanted]


def test_all_to_all_with_splits(ranks: Ranks) -> None:
    n = ranks.size
    ranks(check_splits, [[(i * 7 + j * 3) % 5 for j in range(n)] for i in range(n)], 3)
    ranks(check_splits, [[1000 * (i == j + 1) for j in range(n)] for i in range(n)], 100)
    ranks(check_splits, [[0] * n] * n, 2)


# ---- any sequence

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"]),
        st.one_of(st.integers(0, 200), st.sampled_from([4096, 16385, 100_003])),
        st.booleans(),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


def run_sequence(rank: Rank, steps: list[tuple[str, int, bool, int]]) -> None:
    n, me = rank.size, rank.index
    pending: list[tuple[Any, str, torch.Tensor, torch.Tensor]] = []
    for name, count, is_async, number in steps:
        inputs = [values(other, count * n, torch.int64, number) for other in range(n)]
        mine, root, work = inputs[me].clone(), number % n, None
        blocks = [tensor.view(n, count) for tensor in inputs]
        output = torch.empty(count * n, dtype=torch.int64)
        if name == "all_reduce":
            expected, output = torch.stack(inputs).sum(0), mine
            work = dist.all_reduce(output, async_op=is_async)
        elif name == "broadcast":
            expected, output = inputs[root], mine
            work = dist.broadcast(output, root, async_op=is_async)
        elif name == "all_gather":
            expected = torch.cat([block[0] for block in blocks])
            work = dist.all_gather_into_tensor(output, mine[:count].clone(), async_op=is_async)
        elif name == "reduce_scatter":
            expected, output = torch.stack([block[me] for block in blocks]).sum(0), output[:count]
            work = dist.reduce_scatter_tensor(output, mine, async_op=is_async)
        else:
            expected = torch.cat([block[me] for block in blocks])
            work = dist.all_to_all_single(output, mine, async_op=is_async)
        pending.append((work, name, output, expected))
    for work, name, output, expected in pending:
        if work is not None:
            work.wait()
        assert torch.equal(output, expected), name


@given(STEPS)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_sequence(ranks: Ranks, steps: list[tuple[str, int, bool, int]]) -> None:
    ranks(run_sequence, steps)


# ---- groups


def check_groups(rank: Rank) -> None:
    """Overlapping groups, used in turn and at once."""
    groups = [
        (members, dist.new_group(members))
        for members in ([0, 1], list(range(rank.size)), [rank.size - 1, 0], [rank.index])
        if members != [rank.index]
    ]
    for _ in range(3):
        works = []
        for members, group in groups:
            if rank.index in members:
                tensor = torch.full((1000,), rank.index + 1)
                works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, members))
        for work, tensor, members in works:
            work.wait()
            assert tensor.eq(sum(member + 1 for member in members)).all()
    for _, group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_groups_overlap(ranks: Ranks) -> None:
    ranks(check_groups)


def check_again(rank: Rank) -> None:
    for round_ in range(3):
        join(rank)
        tensor = torch.tensor([rank.index + round_])
        dist.all_reduce(tensor)
        assert tensor.item() == sum(range(rank.size)) + rank.size * round_
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_destroyed_and_made_again_on_one_store(size: int) -> None:
    ranks = Ranks(size, backend=None)
    ranks(check_again)
    ranks(check_again)
    ranks.leave()
