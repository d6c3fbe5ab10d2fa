"""DistributedDataParallel over other ranks: the same wrapper goes on, as if it had been planned."""

from __future__ import annotations

import os
import re
import signal
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lab import ROOT
from lab.oracle import bits
from lab.outcomes import Outcome, in_child, rank_of
from lab.ranks import Rank, Ranks, error_of, ranks
from ringcomm.compression import hooks
from ringcomm.elastic import ddp, transfer
from ringcomm.elastic.state import Tracked


class Net(nn.Module):
    """A challenge to a reducer: parameters in another order than they are used in, and buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(24, 4)
        self.norm = nn.BatchNorm1d(24)
        self.first = nn.Linear(8, 24)
        self.middle = nn.Linear(24, 24)
        self.spare = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, spare: bool = True) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        y = self.last(nn.functional.dropout(torch.relu(self.middle(x)) + x, 0.2))
        return y + self.spare(y) if spare else y


# Options of DDP.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    # One bucket: with two, its second round is called in the order in which their first ones end.
    "power_hook": {"bucket_cap_mb": 25},
    "inner_compile": {"bucket_cap_mb": 1},  # torch.compile takes no less
    "outer_compile": {"bucket_cap_mb": 1},
    **{name: {} for name in ("fp16_hook", "built_in_hook", "int8_hook")},
    **{name: {} for name in ("no_sync", "mesh", "old_torch")},
}


SHORT = ("plain", "unused", "int8_hook", "inner_compile")  # those of the short form


def hook(variant: str, model: Any) -> None:
    if variant == "fp16_hook":
        model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif variant == "built_in_hook":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif variant == "power_hook":
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif variant == "int8_hook":
        model.register_comm_hook(hooks.CompressionState(flat=True), hooks.compress)


class Loop:
    """A training loop, with changes of ranks that each rank makes by itself."""

    def __init__(self, rank: Rank, variant: str, members: list[int]) -> None:
        self.rank, self.variant, self.epoch, self.compiled = rank, variant, 0, 0
        if variant == "old_torch":
            ddp.missing = lambda wrapper: "Reducer.new_name"
        self.group(members)
        torch.manual_seed(10 + rank.index)
        self.models = [self.model(seed) for seed in range(2)]
        self.inner = [ddp.unwrapped(model) for model in self.models]
        parameters = [p for model in self.models for p in model.parameters()]
        self.opt = torch.optim.AdamW(parameters, 0.01)
        self.tracked = Tracked(one=self.models[0], two=self.models[1], opt=self.opt)
        self.kill: Callable[[], None] = lambda: None
        for model in self.inner:
            model.middle.weight.register_hook(lambda _: self.kill())

    def model(self, seed: int) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net: Any = Net()
        options = {"init_sync": False, "bucket_cap_mb": 0.001, **VARIANTS[self.variant]}
        if self.variant == "mesh":
            options["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
        if self.variant == "inner_compile":
            net = torch.compile(net, backend=self.compiler)
        model = DistributedDataParallel(net, **options)
        hook(self.variant, model)
        if self.variant == "outer_compile":
            return torch.compile(model, backend=self.compiler)
        return model

    def compiler(self, graph: Any, _: Any) -> Any:
        self.compiled += 1
        return graph.forward

    def group(self, members: list[int]) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "ringcomm",
            store=dist.PrefixStore(f"epoch {self.epoch}", self.rank.store),
            rank=members.index(self.rank.index),
            world_size=len(members),
        )
        self.epoch += 1

    def change(self, old: list[int], new: list[int]) -> None:
        joiners = [index for index, rank in enumerate(new) if rank not in old]
        givers = [index for index, rank in enumerate(new) if rank in old]
        self.group(new)
        if self.rank.index not in old:
            transfer.receive(self.tracked.unpack, dist.group.WORLD, givers)
            self.tracked.finish()
        elif joiners:
            transfer.send(self.tracked.pack(), dist.group.WORLD, givers, joiners)
        for wrapper in self.tracked.wrappers:
            name = wrapper._get_ddp_logging_data().get("comm_hook")
            ddp.regroup(wrapper, dist.group.WORLD, rebuild=bool(joiners))
            assert wrapper._get_ddp_logging_data().get("comm_hook") == name
            assert self.variant != "mesh" or wrapper.device_mesh.size() == len(new)

    def step(self, step: int) -> float:
        """Compute gradients, and apply them."""
        self.opt.zero_grad(set_to_none=step % 2 == 0)
        total = 0.0
        for model, wrapper in zip(self.models, self.tracked.wrappers, strict=True):
            for part in range(2 if self.variant == "no_sync" else 1):
                seed = 1000 * step + 10 * self.rank.index + part
                x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
                wrapper.require_backward_grad_sync = self.variant != "no_sync" or part == 1
                spare = self.variant != "unused" or step % 2 == 0
                loss = model(x, spare=spare).square().mean()
                loss.backward()
                total += loss.item()
        self.opt.step()
        return total

    def digests(self) -> list[str]:
        tensors = [t for net in self.inner for t in net.parameters()]
        tensors += [t for state in self.opt.state.values() for t in state.values()]
        return [bits(t.detach()) for t in tensors]

    def outcome(self, losses: list[float]) -> Outcome:
        dist.destroy_process_group()
        own = [losses, self.tracked.fingerprint(buffers=True), self.compiled]
        return {"state": self.digests(), "own": own}


def shrunk(rank: Rank, variant: str, victim: int, at: int, planned: bool) -> Outcome:
    """Rank `victim` goes before step `at`: because that was planned, or in its backward pass."""

    def body() -> Outcome:
        warnings.simplefilter("ignore")
        loop = Loop(rank_of(rank, f"{variant} {victim} {at} {planned}"), variant, [0, 1, 2])
        losses, rest = [], [member for member in range(3) if member != victim]
        if rank.index == victim and not planned:
            loop.kill = lambda: os.kill(os.getpid(), signal.SIGKILL) if step == at else None
        for step in range(at + 5):
            if planned and step == at:
                if rank.index == victim:
                    break
                loop.change([0, 1, 2], rest)
            loop.tracked.mark()
            try:
                losses.append(loop.step(step))
            except RuntimeError:
                if planned or step != at:
                    raise
                loop.tracked.restore()
                loop.change([0, 1, 2], rest)
                losses.append(loop.step(step))
        return loop.outcome(losses)

    return in_child(body)


def prepared(rank: Rank) -> None:
    """Import what the children would import, each for itself."""
    module = torch.compile(nn.Linear(2, 2), backend="eager")
    module(torch.ones(2))  # no backward pass: it may start threads, and no fork has them
    torch.optim.AdamW(module.parameters()).step()


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with ranks(3, backend=None) as some:
        some(prepared)
        yield some


@pytest.mark.parametrize(
    ("variant", "victim", "at"),
    [
        *[("plain", 0, 0), ("plain", 2, 1), ("mesh", 0, 2), ("power_hook", 2, 1)],
        *[("static_graph", 1, 0), ("static_graph", 0, 1)],
        *forms(
            [(variant, 1, 3) for variant in VARIANTS if variant != "outer_compile"],
            *((variant, 1, 3) for variant in SHORT),
        ),
    ],
)
def test_a_death_in_backward_is_as_a_planned_change(
    three: Ranks, variant: str, victim: int, at: int
) -> None:
    churned = three(shrunk, variant, victim, at, False)
    planned = three(shrunk, variant, victim, at, True)
    assert churned[victim] == {"killed": signal.SIGKILL}
    del churned[victim], planned[victim]
    assert churned == planned
    assert churned[0]["state"] == churned[1]["state"]


def grown(rank: Rank, variant: str, at: int) -> Outcome:
    """Rank 2 joins before step `at`; it comes back to the group of the others' then."""

    def body() -> Outcome:
        warnings.simplefilter("ignore")
        here = rank_of(rank, f"grow {variant}")
        losses, before = [], 0
        is_joiner = rank.index == 2
        loop = Loop(
            rank_of(here, "alone") if is_joiner else here, variant, [2] if is_joiner else [0, 1]
        )
        loop.rank, loop.epoch = here, 1
        for step in range(at if is_joiner else 0, at + 5):
            if step == at:
                with torch.no_grad():  # then DDP does not share buffers before the next pass
                    for model in [] if is_joiner else loop.models:
                        model(torch.ones(4, 8))
                before = loop.compiled
                loop.change([0, 1], [0, 1, 2])
                at_once = loop.digests()
            losses.append(loop.step(step))
        again = loop.compiled != before and not is_joiner
        return {**loop.outcome(losses), "at_once": at_once, "again": again}

    return in_child(body)


@pytest.mark.parametrize(
    "variant", forms([name for name in VARIANTS if name != "old_torch"], *SHORT, "static_graph")
)
def test_a_joiner_computes_as_the_others(three: Ranks, variant: str) -> None:
    outcomes = three(grown, variant, 4)
    assert "raised" not in str(outcomes), outcomes
    for outcome in outcomes:
        assert outcome["at_once"] == outcomes[0]["at_once"]
        assert outcome["state"] == outcomes[0]["state"]
        assert (outcome["again"], outcome["own"][-1] > 0) == (False, "compile" in variant)


def gradients(rank: Rank, view: bool, at: int) -> None:
    """Between backward() and the optimizer's step, a change leaves gradients as they are."""
    model = DistributedDataParallel(nn.Linear(8, 8), gradient_as_bucket_view=view)
    for step in range(at):
        model.zero_grad(set_to_none=step % 2 == 0)
        model(torch.ones(2, 8) * rank.index).sum().backward()
    model.module.bias.grad = None
    before = model.module.weight.grad.clone()
    ddp.regroup(model, dist.group.WORLD, rebuild=True)
    assert model.module.bias.grad is None
    assert torch.equal(model.module.weight.grad, before)
    model.zero_grad(set_to_none=False)
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
    assert all((parameter.grad == 6).all() for parameter in model.parameters())


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as some:
        yield some


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("view", [False, True])
def test_gradients_stay(two: Ranks, view: bool, at: int) -> None:
    two(gradients, view, at)


def layouts(rank: Rank, variant: str) -> Outcome:
    """One rank's buckets are laid out by the order of use, the other's are as they were made."""

    def body() -> Outcome:
        here = rank_of(rank, variant)
        loop = Loop(rank_of(here, f"alone {rank.index}"), variant, [rank.index])
        for step in range(3 if rank.index else 0):
            loop.step(step)
        loop.rank, loop.epoch = here, 1
        loop.change([0, 1], [0, 1])
        return {"error": error_of(lambda: [loop.step(step) for step in range(3)])[1]}

    return in_child(body)


def test_buckets_are_laid_out_alike(two: Ranks) -> None:
    assert two(layouts, "plain") == [{"error": ""}] * 2
    for outcome in two(layouts, "old_torch"):
        assert "all_reduce" in outcome["error"], "a new reducer would not be needed"


def refusals(rank: Rank) -> None:
    def text(thing: Any) -> str:
        kind, said = error_of(lambda: Tracked(x=thing))
        assert kind in ("TypeError", "ValueError"), (kind, said)
        assert len(said.split()) <= 25, said
        return said

    wrapped = partial(DistributedDataParallel, nn.Linear(4, 4), init_sync=False)
    zero = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
    assert "ZeroRedundancyOptimizer" in text(zero)
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    sharded = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    assert "FullyShardedDataParallel" in text(nn.Sequential(sharded))
    assert "DTensors" in text(fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,))))
    group = dist.new_group([0, 1])
    assert "over a subgroup" in text(wrapped(process_group=group))
    hooked = wrapped()
    hooked.register_comm_hook(group, default_hooks.allreduce_hook)
    assert "hook over a subgroup" in text(hooked)
    mixed = wrapped()
    mixed.mixed_precision = object()
    assert "mixed_precision" in text(mixed)
    uneven = wrapped()
    tracked = Tracked(x=uneven)
    with uneven.join():
        assert "join()" in error_of(tracked.mark)[1]
        assert "join()" in error_of(lambda: ddp.regroup(uneven, dist.group.WORLD, True))[1]
    next(uneven.parameters())._in_backward_optimizers = []
    assert "in backward" in text(uneven)
    dist.destroy_process_group(group)


def wrappers(rank: Rank) -> None:
    single, two, other = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(3))
    nested = nn.ModuleList([nn.Sequential(two), single])
    assert ddp.wrappers_in([nested, single, "text", other]) == [two, single, other]
    assert (ddp.unwrapped(single), ddp.unwrapped(nested)) == (single.module, nested)
    assert ddp.missing(single) == ""


def lacking(rank: Rank) -> None:
    for name in ("_ddp_init_helper", "_build_params_for_reducer"):
        model = DistributedDataParallel(nn.Linear(2, 2))
        before, kept = (model.reducer, model.process_group), getattr(DistributedDataParallel, name)
        delattr(DistributedDataParallel, name)
        try:
            text = error_of(partial(ddp.regroup, model, dist.group.WORLD, rebuild=True))[1]
        finally:
            setattr(DistributedDataParallel, name, kept)
        assert before == (model.reducer, model.process_group), "something changed"
        assert text == (
            f"this torch ({torch.__version__}) has no DistributedDataParallel.{name}, which "
            "joining needs for DDP: ranks may leave but not join"
        )


@pytest.mark.parametrize("task", [refusals, wrappers, lacking])
def test_what_wrappers_are(two: Ranks, task: Callable[[Rank], None]) -> None:
    two(task)


def test_other_torches_have_the_attributes() -> None:
    """Those of which `make compat` has left the sources here."""
    for path in ROOT.glob("build/compat/headers-*/torch/nn/parallel/distributed.py"):
        text = path.read_text()
        for name in ddp._OF_WRAPPER:
            assert re.search(rf"def {name}\(|self\.{name}(: [^=]*)? = ", text), (path, name)
        helper = re.findall(r"def _ddp_init_helper\(([^)]*)\)", text)[0]
        assert [name.strip() for name in helper.split(",")][1:-1] == ddp._HELPER, path
        for name in ("_update_process_group", "_has_rebuilt_buckets", "_join_config"):
            assert name in text, (path, name)


def test_groups_inside_modules_and_hooks_are_changed() -> None:
    """Torch refuses SyncBatchNorm in DDP on CPUs, so a stand-in has its place."""
    old, new, other = object(), object(), object()
    norms = [nn.SyncBatchNorm(4, process_group=group) for group in (old, other, None)]
    model = types.SimpleNamespace(
        module=nn.Sequential(*norms),
        process_group=old,
        static_graph=False,
        _comm_hooks=[(print, types.SimpleNamespace(process_group=old)), (print, None)],
        _update_process_group=lambda group: None,
    )
    ddp.regroup(model, new, rebuild=False)
    assert [norm.process_group for norm in norms] == [new, other, None]
    assert model._comm_hooks[0][1].process_group is new
    assert ddp._moved(old, old, new) is new
