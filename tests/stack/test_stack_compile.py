"""Collectives that have gradients, in both of torch's kinds, and compiled; a compiled DDP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnn
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from lab.pair import STEPS, Pair, State, only_ours
from lab.ranks import Rank


@pytest.fixture(scope="module")
def two() -> Iterator[Pair]:
    pair = Pair(2)
    yield pair
    pair.leave()


@pytest.fixture(scope="module")
def four() -> Iterator[Pair]:
    pair = Pair(4)
    yield pair
    pair.leave()


# torch.distributed.nn: what a rank calls, and what it is to yield there, made of all inputs. Ranks
# whose output means nothing (no root) are left out by REFERENCES giving None.
Tensors = list[torch.Tensor]
ROOT = 1


def pieces(x: torch.Tensor, n: int) -> Tensors:
    return [piece.contiguous() for piece in x.chunk(n)]


def sizes(index: int, n: int) -> list[int]:
    """Return how many of its rows rank `index` sends to each: as many as it gets from each."""
    return [1 + (index + other) % 3 for other in range(n)]


def to_all(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    sent = pieces(x, rank.size)
    return torch.cat(dnn.all_to_all([torch.empty_like(piece) for piece in sent], sent))


def to_all_uneven(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    split = sizes(rank.index, rank.size)
    rows = x[: sum(split)]
    return dnn.all_to_all_single(torch.empty_like(rows), rows, split, split)


def reduce_scattered(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    sent = pieces(x, rank.size)
    return dnn.reduce_scatter(torch.empty_like(sent[0]), sent)


NN_OPS: dict[str, Callable[[torch.Tensor, Rank], torch.Tensor]] = {
    "all_reduce": lambda x, _: dnn.all_reduce(x),
    "all_gather": lambda x, _: torch.cat(dnn.all_gather(x)),
    "all_to_all": to_all,
    "all_to_all_single": lambda x, _: dnn.all_to_all_single(torch.empty_like(x), x),
    "all_to_all_uneven": to_all_uneven,
    "reduce_scatter": reduce_scattered,
    "broadcast": lambda x, _: dnn.broadcast(x, ROOT),
    "gather": lambda x, _: torch.cat(dnn.gather(x, ROOT)),
    "scatter": lambda x, rank: dnn.scatter(pieces(x, rank.size), ROOT),
    "reduce": lambda x, _: dnn.reduce(x, ROOT),
}


def uneven_there(inputs: Tensors, me: int) -> torch.Tensor:
    split = [
        x[: sum(sizes(i, len(inputs)))].split(sizes(i, len(inputs))) for i, x in enumerate(inputs)
    ]
    return torch.cat([rows[me] for rows in split])


def exchanged(inputs: Tensors, me: int) -> torch.Tensor:
    return torch.cat([x.chunk(len(inputs))[me] for x in inputs])


REFERENCES: dict[str, Callable[[Tensors, int], torch.Tensor | None]] = {
    "all_reduce": lambda inputs, _: sum(inputs[1:], inputs[0]),
    "all_gather": lambda inputs, _: torch.cat(inputs),
    "all_to_all": exchanged,
    "all_to_all_single": exchanged,
    "all_to_all_uneven": uneven_there,
    "reduce_scatter": lambda inputs, me: sum(inputs[1:], inputs[0]).chunk(len(inputs))[me],
    "broadcast": lambda inputs, _: inputs[ROOT],
    "gather": lambda inputs, me: torch.cat(inputs) if me == ROOT else None,
    "scatter": lambda inputs, me: inputs[ROOT].chunk(len(inputs))[me],
    "reduce": lambda inputs, me: sum(inputs[1:], inputs[0]) if me == ROOT else None,
}


def nn_descend(rank: Rank, op: str) -> State:
    """Descend along the gradients that the operation gives back; compare with one process."""
    torch.manual_seed(0)
    shape = (3 * rank.size, 5)
    ones = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(rank.size)]
    mine = ones[rank.index].detach().clone().requires_grad_()
    for _ in range(STEPS):
        expected = [REFERENCES[op](ones, index) for index in range(rank.size)]
        sum(weighed(y, index) for index, y in enumerate(expected) if y is not None).backward()
        result = NN_OPS[op](mine * 1, rank)
        wanted = expected[rank.index]
        if wanted is None:
            (result * 0).sum().backward()  # the backward pass is a collective too
        else:
            torch.testing.assert_close(result, wanted)
            weighed(result, rank.index).backward()
        with torch.no_grad():
            for x in (*ones, mine):
                x -= 0.1 * (0 if x.grad is None else x.grad)
                x.grad = None
    torch.testing.assert_close(mine, ones[rank.index])
    return {"input": mine}


def weighed(result: torch.Tensor, index: int) -> torch.Tensor:
    """Return what each element and rank counts differently in."""
    weights = torch.arange(1, result.numel() + 1, dtype=result.dtype).view_as(result)
    return (torch.sin(result) * (weights / result.numel() + index)).sum()


@pytest.mark.parametrize("op", NN_OPS)
def test_gradients(two: Pair, op: str) -> None:
    two.check(nn_descend, op)


@pytest.mark.slow
@pytest.mark.parametrize("op", NN_OPS)
def test_gradients_of_four(four: Pair, op: str) -> None:
    four.ours(only_ours, nn_descend, op)


# The functional collectives.
Op = Callable[[torch.Tensor, int], list[torch.Tensor]]
SIZES = [(1, 2), (2, 1)]  # what each of two ranks sends to each: uneven, and as much comes back


def uneven(x: torch.Tensor, rank: int) -> list[torch.Tensor]:
    sent = list(SIZES[rank])
    return [funcol.all_to_all_single(x[:3], sent, sent, world())]


def world() -> dist.ProcessGroup:
    return dist.group.WORLD


OPS: dict[str, Op] = {
    "all_reduce": lambda x, _: [funcol.all_reduce(x, "sum", world())],
    "all_gather": lambda x, _: [funcol.all_gather_single(x, 0, world())],
    "all_gather_dim": lambda x, _: [funcol.all_gather_single(x, 1, world())],
    "reduce_scatter": lambda x, _: [funcol.reduce_scatter_single(x, "sum", 0, world())],
    "reduce_scatter_dim": lambda x, _: [funcol.reduce_scatter_single(x, "sum", 1, world())],
    "all_to_all": lambda x, _: [funcol.all_to_all_single(x, None, None, world())],
    "all_to_all_uneven": uneven,
    "all_reduce_coalesced": lambda x, _: funcol.all_reduce_coalesced(
        [x, x[1:] * 2], "sum", world()
    ),
    "all_gather_coalesced": lambda x, _: funcol.all_gather_single_coalesced(
        [x, x[1:] * 2], world()
    ),
    "reduce_scatter_coalesced": lambda x, _: funcol.reduce_scatter_single_coalesced(
        [x, x * 2], "sum", [0, 1], world()
    ),
}
# They have no gradient.
PLAIN: dict[str, Op] = {
    "max": lambda x, _: [funcol.all_reduce(x, "max", world())],
    "broadcast": lambda x, _: [funcol.broadcast(x, 1, world())],
    "permute": lambda x, _: [funcol.permute_tensor(x.flatten(), [1, 0], world())],
}


# In one graph of the compiler that takes longest: one of each kind.
SOME = ["all_reduce", "reduce_scatter_dim", "all_to_all", "all_reduce_coalesced"]


def start_compiling(cache: Path) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # rather than processes that stay
    torch._dynamo.reset()
    counters.clear()


def loss_of(x: torch.Tensor, rank: torch.Tensor, names: list[str]) -> torch.Tensor:
    """Return what the collectives each have a part in, and every element and rank another.

    The rank is a tensor, as a constant could make another graph of it, in another order.
    """
    loss = torch.zeros(())
    for name in names:
        for result in OPS[name](torch.tanh(x), -1):
            weights = torch.arange(1, result.numel() + 1, dtype=x.dtype).view_as(result)
            loss = loss + (torch.sin(result) * (weights / result.numel() + rank)).sum()
    return loss


def plain(x: torch.Tensor) -> torch.Tensor:
    for op in PLAIN.values():
        for result in op(torch.tanh(x), -1):
            x = x * 0.75 + result.view_as(x) * 0.5
    return x


def descend(rank: Rank, name: str) -> State:
    """Descend along one operation's gradients, eagerly."""
    torch.manual_seed(rank.index)
    x = torch.randn(4, 6, requires_grad=True)
    results: list[torch.Tensor] = []
    for _ in range(STEPS):
        if name in PLAIN:
            with torch.no_grad():
                results = PLAIN[name](x, rank.index)
                x += 0.1 * results[0].view_as(x)
            continue
        results = OPS[name](x, rank.index)
        sum((torch.sin(y) * (1 + rank.index)).sum() for y in results).backward()
        with torch.no_grad():
            x -= 0.1 * x.grad
            x.grad = None
    assert x.isfinite().all(), "nothing to compare"
    last = {f"result {i}": funcol.wait_tensor(y.detach()) for i, y in enumerate(results)}
    return {"input": x} | last


def compiled(rank: Rank, backend: str, cache: Path) -> State:
    """Descend along the gradients of many operations, compiled as one graph; compare with eager."""
    start_compiling(cache)
    names = SOME if backend == "inductor" else [name for name in OPS if name != "all_to_all_uneven"]
    fast, fast_plain = (
        torch.compile(function, fullgraph=True, backend=backend) for function in (loss_of, plain)
    )
    ends = []
    for loss, change in ((loss_of, plain), (fast, fast_plain)):
        torch.manual_seed(rank.index)
        x = torch.randn(4, 6, requires_grad=True)
        for _ in range(STEPS):
            loss(x, torch.tensor(float(rank.index)), names).backward()
            with torch.no_grad():
                x.copy_(change(x.detach() - 0.1 * x.grad))
                x.grad = None
        ends.append(x.detach())
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    return {"input": ends[1]}


class Net(nn.Module):
    """A class of ours: of torch's own, nothing is compiled under DDP. It fills two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 8)])

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            data = torch.tanh(layer(data))
        return data


def compiled_ddp(rank: Rank, cache: Path) -> State:
    """Train a compiled DDP, whose graph breaks at its buckets; compare with one not compiled."""
    start_compiling(cache)
    ends = []
    for fast in (False, True):
        torch.manual_seed(rank.index)
        module = Net()
        model = DistributedDataParallel(module, bucket_cap_mb=1)
        step = torch.compile(model) if fast else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for number in range(STEPS):
            torch.manual_seed(100 * number + rank.index)
            step(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: tensor.detach() for name, tensor in module.named_parameters()})
    assert counters["aot_autograd"]["total"] > 1, "no graph for each bucket"
    for name, tensor in ends[1].items():
        torch.testing.assert_close(tensor, ends[0][name], rtol=1e-4, atol=1e-5)
    return ends[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where all ranks keep what they have compiled: each thing is compiled once."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize("name", [*OPS, *PLAIN])
def test_functional(two: Pair, name: str) -> None:
    two.check(descend, name)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_functional_compiled(two: Pair, cache: Path, backend: str) -> None:
    two.check(compiled, backend, cache, seconds=180)


@pytest.mark.slow
def test_ddp_compiled(two: Pair, cache: Path) -> None:
    two.check(compiled_ddp, cache, seconds=100)
