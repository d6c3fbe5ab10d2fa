"""The hooks in stock DDP, and quantized_all_reduce: the same bits everywhere, and near fp32.

The ranks are of one host. `flat` has them quantise all the same.
"""

from __future__ import annotations

import copy
import math
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringcomm
from lab.limits import claim
from lab.oracle import bits
from lab.outcomes import hear, tell
from lab.ranks import Rank, Ranks, error_of
from ringcomm.compression import exchange, hooks
from ringcomm.compression.codecs import FORMATS, codec_of

STEPS = 8
SMALL = {"bucket_cap_mb": 0.003}  # several buckets
ALL = [(name, error) for name in FORMATS for error in hooks.ERRORS]
KINDS = [kind for kind in ALL if kind[1] != "unbiased" or kind[0] in ("int8", "fp8")]


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    some = Ranks(request.param)
    yield some
    some.leave()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    some = Ranks(2)
    yield some
    some.leave()


class Net(nn.Module):
    """Layers of the same shapes, not in the order of their use; one may be unused."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.second = nn.Linear(24, 4), nn.Linear(24, 24)
        self.spare, self.first = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, data: torch.Tensor, *, spare: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(data))))
        if spare:
            hidden = hidden + self.spare(hidden)
        scores: torch.Tensor = self.last(hidden)
        return scores


def loss_of(rank: int, step: int, model: nn.Module, *, spare: bool = True) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(100 * step + rank)
    data = torch.randn(16, 24, generator=seeded)
    return (model(data, spare=spare) - data[:, :4].sin()).square().mean()


def train(
    rank: Rank, kind: tuple[str, str] | None, variant: str = "", steps: int = STEPS
) -> tuple[list[str], list[list[float]]]:
    """Return the parameters' bits and values; `kind` None: fp32, without a hook."""
    torch.manual_seed(0)
    flags = {
        "unused": "find_unused_parameters",
        "view": "gradient_as_bucket_view",
        "static": "static_graph",
    }
    options: dict[str, Any] = {flags[variant]: True} if variant in flags else {}
    module = Net()
    model = DistributedDataParallel(module, **SMALL, **options)
    state = hooks.register(model, kind[0], error=kind[1], flat=True) if kind else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if variant == "accumulate":
            with model.no_sync():
                loss_of(rank.index, 1000 + step, model).backward()
        loss_of(rank.index, step, model, spare=variant != "unused" or step % 2 > 0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=variant != "view")
    if state is not None:
        state.close()
    values = [parameter.detach().flatten().tolist() for parameter in module.parameters()]
    return [bits(parameter.detach()) for parameter in module.parameters()], values


def apart(ours: list[list[float]], other: list[list[float]]) -> float:
    """Relative, of the parameters' distance."""
    first, second = (torch.tensor([x for part in some for x in part]) for some in (ours, other))
    return float((first - second).norm() / second.norm())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind))
def test_all_ranks_train_alike_and_near_fp32(ranks: Ranks, kind: tuple[str, str]) -> None:
    answers, again = ranks(train, kind), ranks(train, kind)
    exact = ranks(train, None)
    assert all(answer[0] == answers[0][0] for answer in answers)
    assert again == answers  # equal runs are equal
    assert answers[0][0] != exact[0][0]  # it was compressed
    assert apart(answers[0][1], exact[0][1]) < (0.02 if kind[0] == "fp8" else 0.006)


@pytest.mark.parametrize("variant", ["accumulate", "unused", "view", "static"])
def test_variants_of_ddp(two: Ranks, variant: str) -> None:
    for kind in (("int8", "feedback"), ("fp8", "unbiased")):
        answers, exact = two(train, kind, variant), two(train, None, variant)
        assert answers[0][0] == answers[1][0]
        assert apart(answers[0][1], exact[0][1]) < 0.02


def watch_buckets(rank: Rank) -> tuple[int, int, bool]:
    """How many memories went to other parameters, were lost later, and whether buckets changed."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), **SMALL)
    state = hooks.register(model, "int8", flat=True)
    seen: list[dict[int, tuple[Any, Any]]] = []
    for step in range(3):
        loss_of(rank.index, step, model).backward()
        seen.append({i: (b.parameters, b.memory) for i, b in state._buckets.items()})
    lost = sum(seen[1][i][1] is not seen[2][i][1] for i in seen[1])
    moved = [
        i for i in seen[1] if i not in seen[0] or not hooks._same(seen[0][i][0], seen[1][i][0])
    ]
    wrong = sum(i in seen[0] and seen[0][i][1] is seen[1][i][1] for i in moved)
    state.close()
    return wrong, lost, bool(moved)


def test_feedback_stays_with_its_parameters_when_ddp_rebuilds_buckets(two: Ranks) -> None:
    assert two(watch_buckets) == [(0, 0, True)] * 2


def share_a_state(rank: Rank, together: bool) -> tuple[str, str]:
    """Two models, as of a GAN: one after the other, or in one backward pass."""
    models = [DistributedDataParallel(Net(), **SMALL) for _ in range(2)]
    state = hooks.CompressionState(None, "int8", flat=True)
    state.connect()
    for model in models:
        model.register_comm_hook(state, hooks.compress)
    losses = [loss_of(rank.index, 0, model) for model in models]
    try:
        if together:
            return error_of((losses[0] + losses[1]).backward)
        losses[0].backward()
        return error_of(losses[1].backward)
    finally:
        state.close()


@pytest.mark.parametrize("together", [False, True])
def test_a_state_is_of_one_model(two: Ranks, together: bool) -> None:
    for kind, text in two(share_a_state, together):
        assert kind == "RuntimeError"
        assert "this CompressionState is that of another model" in text


def resume(rank: Rank, way: str) -> list[tuple[int, bool]]:
    """Iteration by iteration: buckets that wait for their memory, and whether all have some."""
    module = Net()
    model = DistributedDataParallel(module, **SMALL)
    state = hooks.register(model, "int8", flat=True)
    for step in range(3):
        loss_of(rank.index, step, model).backward()
    saved, parcel = copy.deepcopy(state.state_dict()), pickle.dumps(state)
    state.close()
    model = DistributedDataParallel(module, **SMALL)
    if way == "pickle":
        state = pickle.loads(parcel)
        model.register_comm_hook(state, hooks.compress)
    else:
        state = hooks.register(model, "int8", flat=True)
        state.load_state_dict(saved)
    # So the next gradient shows what was left out: all of it is there at once.
    for bucket in state._loaded.values():
        bucket["own"] = torch.full_like(bucket["own"], 1000.0 * (1 + rank.index))
    seen = []
    for step in range(3, 6):
        model.zero_grad()
        loss_of(rank.index, step, model).backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        seen.append((len(state._loaded), all(bool((g > 1400).all()) for g in gradients)))
    state.close()
    return seen


@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_a_checkpoint_of_what_was_left_out(two: Ranks, way: str) -> None:
    """It waits until DDP has laid out its buckets anew, and is used then, once."""
    for seen in two(resume, way):
        first, second, third = seen
        assert first[0] == second[0] > 1
        assert (first[1], second[1]) == (False, False)
        assert third == (0, True)


def spoilt(rank: Rank, name: str) -> list[bool]:
    """Whether each gradient is finite on this rank, when rank 0's has an inf; and a step later."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1, bias=False))
    state = hooks.register(model, name, flat=True)
    finite = []
    for step in range(2):
        data = torch.ones(1, 8)
        if step == 0 and rank.index == 0:
            data[0, 3] = math.inf
        model.zero_grad()
        model(data).sum().backward()
        gradient = model.module.weight.grad
        finite.append(bool(gradient.isfinite().all()))
    state.close()
    return finite


@pytest.mark.parametrize("name", FORMATS)
def test_an_inf_reaches_all_ranks_and_goes_again(two: Ranks, name: str) -> None:
    assert two(spoilt, name) == [[False, True]] * 2


# ---- quantized_all_reduce


def all_ranks(hosts: list[str], rank: int, *, flat: bool) -> tuple[list[int], list[int]]:
    """As if each rank were on a host of its own."""
    del flat
    return list(range(len(hosts))), [rank]


def reduce_all(rank: Rank, how: dict[str, Any], count: int, dtype: str) -> tuple[str, float]:
    """Return the bits of the result, and how far it is from the true one, relatively."""
    places = exchange._places
    exchange._places = all_ranks
    try:
        every = [
            torch.randn(count, generator=torch.Generator().manual_seed(i)).to(getattr(torch, dtype))
            for i in range(rank.size)
        ]
        tensor = every[rank.index].clone()
        work = ringcomm.compression.quantized_all_reduce(tensor, **how)
        if work is not None:
            work.wait()
            assert work.is_success()
    finally:
        exchange._places = places
    true = sum(gradient.double() for gradient in every)
    if how.get("op") == dist.ReduceOp.AVG:
        true /= rank.size
    assert isinstance(true, torch.Tensor)
    error = (tensor.double() - true).norm() / true.norm().clamp_min(1e-30)
    return bits(tensor), float(error)


def call_in_callback(rank: Rank) -> float:
    """Return the result of one that a callback of another one makes."""

    def again(done: Any) -> Any:
        tensor = done.value().clone()
        ringcomm.compression.quantized_all_reduce(tensor)
        return tensor

    work = ringcomm.compression.quantized_all_reduce(torch.ones(1000), async_op=True)
    assert work is not None
    result = work.get_future().then(again)
    return float(torch.futures.wait_all([result])[0][0])


def test_a_callback_may_call_it(two: Ranks) -> None:
    for value in two(call_in_callback):
        assert value == pytest.approx(4, rel=0.02)


def two_hosts(hosts: list[str], rank: int, *, flat: bool) -> tuple[list[int], list[int]]:
    """As if the first two of four ranks were on one host, and the others on another one."""
    del hosts, flat
    return [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]


def average_on_two_hosts(rank: Rank, number: float) -> list[float]:
    places = exchange._places
    exchange._places = two_hosts
    try:
        tensor = torch.full((1000,), number, dtype=torch.float16)
        avg = dist.ReduceOp.AVG
        ringcomm.compression.quantized_all_reduce(tensor, format="fp16", op=avg)
    finally:
        exchange._places = places
    return [float(value) for value in (tensor.min(), tensor.max())]


def test_an_average_in_fp16_is_as_large_as_its_numbers() -> None:
    """The sum of one host would be an inf."""
    four = Ranks(4)
    try:
        assert four(average_on_two_hosts, 60_000.0) == [[60_000.0] * 2] * 4
    finally:
        four.leave()


@pytest.mark.parametrize("count", [0, 1, 300, 100_000, 2_500_000])
def test_sizes(ranks: Ranks, count: int) -> None:
    answers = ranks(reduce_all, {}, count, "float32")
    assert len({answer[0] for answer in answers}) == 1
    assert all(answer[1] < 0.02 for answer in answers)
    assert count < 2 or answers[0][1] > 1e-4


@pytest.mark.parametrize(
    ("how", "most"),
    [
        ({"op": dist.ReduceOp.AVG}, 0.02),
        ({"format": "fp8"}, 0.06),
        ({"bits": 16}, 0.006),
        ({"format": "fp16"}, 0.003),
        ({"seed": 3}, 0.02),
        ({"async_op": True}, 0.02),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_calls(two: Ranks, how: dict[str, Any], most: float, dtype: str) -> None:
    answers = two(reduce_all, how, 10_000, dtype)
    assert answers[0] == answers[1]
    assert answers[0][1] < most


def layouts(rank: Rank) -> list[bool]:
    """Tensors that are no row of memory, inside a host: these sums are exact."""
    wide = torch.full((6, 8), rank.index + 1.0)
    ringcomm.compression.quantized_all_reduce(wide.t()[::2])
    scalar = torch.tensor(rank.index + 1.0)
    ringcomm.compression.quantized_all_reduce(scalar, op=dist.ReduceOp.AVG)
    leaf = nn.Parameter(torch.ones(3))
    ringcomm.compression.quantized_all_reduce(leaf)
    sums = [bool((wide[:, ::2] == 3).all()), bool((wide[:, 1::2] == rank.index + 1).all())]
    return [*sums, scalar.item() == 1.5, leaf.tolist() == [2, 2, 2]]


def test_layouts_and_exact_sums_inside_a_host(two: Ranks) -> None:
    assert two(layouts) == [[True] * 4] * 2


def refusals(rank: Rank) -> list[tuple[str, str]]:
    del rank
    call, tensor = ringcomm.compression.quantized_all_reduce, torch.ones(4)
    return [
        error_of(lambda: call(tensor.double())),
        error_of(lambda: call(tensor.to_sparse())),
        error_of(lambda: call(tensor, 4)),
        error_of(lambda: call(tensor, 16, format="int8")),
        error_of(lambda: call(tensor, format="int3")),
        error_of(lambda: call(tensor, format="bf16", seed=1)),
        error_of(lambda: call(tensor, op=dist.ReduceOp.MAX)),
        error_of(lambda: hooks.CompressionState(None, "fp16", error="unbiased")),
        error_of(lambda: hooks.CompressionState(None, error="lost")),
    ]


def test_what_is_refused(two: Ranks) -> None:
    told = two(refusals)[0]
    assert [kind for kind, _ in told] == ["TypeError"] * 2 + ["ValueError"] * 7
    words = ["float64", "sparse", "8 or 16, not 4", "int8 has 8 bits", "no format 'int3'"]
    words += ["leave the seed out", "SUM and AVG", "choose feedback or drop", "error='lost'"]
    for word, (_, text) in zip(words, told, strict=True):
        assert word in text


def test_which_ranks_exchange_codes() -> None:
    places = exchange._places
    assert places(["a", "a", "b", "b"], 3, flat=False) == ([1, 3], [2, 3])
    assert places(["a", "b", "a", "b"], 2, flat=False) == ([2, 3], [0, 2])
    assert places(["a", "a", "b"], 1, flat=False) == ([0, 1, 2], [1])
    assert places(["a", "a"], 0, flat=False) == ([0], [0, 1])
    assert places(["a", "a"], 0, flat=True) == ([0, 1], [0])


def after_close(rank: Rank) -> tuple[str, str]:
    closed = exchange.Exchange(dist.group.WORLD, flat=True)
    how = exchange.Compression(codec_of("int8"))
    closed.submit(torch.full((3,), rank.index + 1.0), how).wait()
    closed.close()
    return error_of(lambda: closed.all_reduce(torch.ones(3), how))


def test_a_closed_exchange_takes_no_other_group(two: Ranks) -> None:
    """Torch takes the default group for None: a call there would mismatch what others call."""
    for kind, text in two(after_close):
        assert kind == "ValueError"
        assert "is not registered" in text


def interrupted(rank: Rank) -> tuple[str, float]:
    """Ctrl-C on rank 0, which waits for rank 1."""
    tensor = torch.ones(1000)
    ringcomm.compression.quantized_all_reduce(tensor, format="fp16")
    if rank.index == 1:
        hear(rank, "interrupted")
        ringcomm.compression.quantized_all_reduce(tensor)
        return "", 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    began, kind = time.monotonic(), ""
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        ringcomm.compression.quantized_all_reduce(tensor)
    except KeyboardInterrupt:
        kind = "KeyboardInterrupt"
    seconds = time.monotonic() - began
    tell(rank, "interrupted")
    signal.signal(signal.SIGALRM, before)
    return kind, seconds


def test_ctrl_c_ends_a_wait(two: Ranks) -> None:
    kind, seconds = two(interrupted)[0]
    assert kind == "KeyboardInterrupt"
    assert seconds < claim(1)


def test_groups_of_gloo() -> None:
    some = Ranks(2, "gloo")
    answers = some(reduce_all, {}, 10_000, "float32")
    assert answers[0] == answers[1]
    assert 1e-4 < answers[0][1] < 0.02
    trained = some(train, ("int8", "feedback"))
    assert trained[0] == trained[1]
    some.leave()
