"""Sharded training over ringcomm: ZeRO, FSDP and fully_shard train to the parameters of Gloo."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms
from torch import nn
from torch.distributed import fsdp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lab.pair import STEPS, Pair, State
from lab.ranks import Rank

# At more than 2 ranks, where sums have several orders; of SGD: Adam hides a wrong scale.
RTOL = 1e-4


class Block(nn.Module):
    """A unit of sharding. Its sizes are odd, so that shards are padded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 27), nn.Linear(27, width)
        self.idle = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.idle:
            return x
        result: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(11, 13), Block(13), Block(13), nn.Linear(13, 5))


def loss_of(model: Callable[..., torch.Tensor], rank: int, step: int) -> torch.Tensor:
    """Every rank and step has a batch of its own."""
    seeded = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(6, 11, generator=seeded)
    labels = torch.randint(0, 5, (6,), generator=seeded)
    return nn.functional.cross_entropy(model(inputs).float(), labels)


def flat(tree: Any, name: str = "") -> State:
    """Return the tensors and numbers in a state dict, by their path."""
    if isinstance(tree, torch.Tensor):
        return {name: tree.full_tensor() if isinstance(tree, DTensor) else tree}
    if isinstance(tree, (int, float)):
        return {name: torch.tensor(float(tree))}
    if isinstance(tree, (list, tuple)):
        tree = dict(enumerate(tree))
    pairs = tree.items() if isinstance(tree, dict) else ()
    return {k: v for key, value in pairs for k, v in flat(value, f"{name}/{key}").items()}


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[int, Pair]]:
    """By the number of ranks; they start when first used."""
    some = {size: Pair(size) for size in (2, 3, 4)}
    yield some
    for pair in some.values():
        pair.leave()


# --- ZeroRedundancyOptimizer

ZERO: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket_view": {"parameters_as_bucket_view": True, "momentum": 0.9},
    "adam": {"optimizer_class": torch.optim.Adam, "lr": 0.01},
    "groups": {"momentum": 0.9},
    "join": {"momentum": 0.9},
}


def zero(rank: Rank, variant: str) -> State:
    """Parameters, and at rank 0 the whole state of the optimizer."""
    module = net(rank.index)  # DDP broadcasts rank 0's
    model = DistributedDataParallel(module)
    first = module[0].parameters() if variant == "groups" else module.parameters()
    chosen = {"optimizer_class": torch.optim.SGD, "lr": 0.1} | ZERO[variant]
    optimizer = ZeroRedundancyOptimizer(first, **chosen)
    if variant == "groups":
        optimizer.add_param_group({"params": list(module[1:].parameters()), "lr": 0.05})
    uneven = variant == "join"
    with Join([model, optimizer]) if uneven else contextlib.nullcontext():
        for step in range(STEPS + rank.index if uneven else STEPS):
            loss_of(model, rank.index, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == STEPS // 2 and not uneven:  # go on from what rank 0 has collected
                optimizer.consolidate_state_dict(to=0)
                box = [optimizer.state_dict() if rank.index == 0 else None]
                dist.broadcast_object_list(box, src=0)
                optimizer.load_state_dict(box[0])
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if rank.index == 0 else {}
    return flat(module.state_dict()) | flat(state, "optimizer")


@pytest.mark.parametrize("variant", forms(ZERO, "plain", "bucket_view", "join"))
def test_zero(pairs: dict[int, Pair], variant: str) -> None:
    pairs[2].check(zero, variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["bucket_view", "join"])
def test_zero_of_three(pairs: dict[int, Pair], variant: str) -> None:
    pairs[3].check(zero, variant, rtol=RTOL)


def overlapped(rank: Rank, shard_buckets: bool) -> State:
    """The optimizer's step is part of the gradients' hook, which torch refuses over Gloo.

    There, one comes after the other. Left out is the interleaved hook: it calls collectives from
    callbacks of futures, which on CPU run in an order of their own on every rank.
    """
    overlap = dist.get_backend() != "gloo"
    module = net(rank.index)
    model = DistributedDataParallel(module, bucket_cap_mb=0.002)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, overlap_with_ddp=overlap, lr=0.05, momentum=0.9
    )
    if overlap:
        hook = hook_with_zero_step(allreduce_hook, model, optimizer, shard_buckets=shard_buckets)
        model.register_comm_hook(None, hook)
    for step in range(STEPS):
        loss_of(model, rank.index, step).backward()
        if overlap or step >= 2:  # the hook makes no step before DDP has chosen its buckets
            optimizer.step()
        optimizer.zero_grad()
    return flat(module.state_dict())


@pytest.mark.parametrize("shard_buckets", [False, True])
def test_zero_overlapped(pairs: dict[int, Pair], shard_buckets: bool) -> None:
    pairs[2].check(overlapped, shard_buckets)


# --- FullyShardedDataParallel

POST = fsdp.BackwardPrefetch.BACKWARD_POST
FSDP1: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"sharding_strategy": fsdp.ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": fsdp.ShardingStrategy.NO_SHARD},
    "bf16": {"mixed_precision": fsdp.MixedPrecision(*[torch.bfloat16] * 3)},
    "bf16_reduce": {"mixed_precision": fsdp.MixedPrecision(reduce_dtype=torch.bfloat16)},
    "fp16_reduce": {"mixed_precision": fsdp.MixedPrecision(reduce_dtype=torch.float16)},
    "orig_params": {"use_orig_params": True},
    "prefetch": {"backward_prefetch": POST, "forward_prefetch": True},
    "no_sync": {},
    "clip": {},
    # of 4 ranks
    "hybrid": {"sharding_strategy": fsdp.ShardingStrategy.HYBRID_SHARD},
    "hybrid_zero2": {"sharding_strategy": fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2},
}


def grid(rank: Rank) -> DeviceMesh:
    """2 replicas of 2 shards: made once, a mesh's groups live as long as the process."""
    if "grid" not in rank.kept:
        rank.kept["grid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
    return rank.kept["grid"]


def wrapped(rank: Rank, variant: str) -> fsdp.FullyShardedDataParallel:
    options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu")}
    if "hybrid" in variant:
        options["device_mesh"] = grid(rank)
    return fsdp.FullyShardedDataParallel(net(), **options, **FSDP1[variant])


def fsdp1(rank: Rank, variant: str) -> State:
    """Parameters, and the norms of the gradients where they are clipped."""
    model = wrapped(rank, variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: State = {}
    for step in range(STEPS):
        silent = variant == "no_sync" and step % 3 != 2
        with model.no_sync() if silent else contextlib.nullcontext():
            loss_of(model, rank.index, step).backward()
        if silent:
            continue
        if variant == "clip":
            state[f"norm {step}"] = model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    with fsdp.FullyShardedDataParallel.summon_full_params(model):
        state |= {name: value.detach().clone() for name, value in model.named_parameters()}
    return state


@pytest.mark.parametrize(
    "variant",
    forms([name for name in FSDP1 if "hybrid" not in name], "full", "bf16", "orig_params", "clip"),
)
def test_fsdp1(pairs: dict[int, Pair], variant: str) -> None:
    pairs[2].check(fsdp1, variant)


@pytest.mark.parametrize("variant", forms(["clip", "hybrid", "hybrid_zero2"], "hybrid"))
def test_fsdp1_of_four(pairs: dict[int, Pair], variant: str) -> None:
    pairs[4].check(fsdp1, variant, rtol=RTOL)


def saved(rank: Rank, kind: fsdp.StateDictType) -> State:
    """Go on, halfway, from a state dict given to a fresh model."""
    api = fsdp.FullyShardedDataParallel
    model = wrapped(rank, "orig_params")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        if step == STEPS // 2:
            api.set_state_dict_type(model, kind)
            module, moments = model.state_dict(), api.optim_state_dict(model, optimizer)
            model = wrapped(rank, "orig_params")
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            api.set_state_dict_type(model, kind)
            model.load_state_dict(module)
            optimizer.load_state_dict(api.optim_state_dict_to_load(model, optimizer, moments))
        loss_of(model, rank.index, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    api.set_state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT)
    return flat(model.state_dict()) | flat(api.optim_state_dict(model, optimizer), "optimizer")


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_fsdp1_state_dict(pairs: dict[int, Pair], kind: str) -> None:
    pairs[2].check(saved, fsdp.StateDictType[f"{kind}_STATE_DICT"])


# --- fully_shard

FSDP2: dict[str, dict[str, Any]] = {
    "plain": {},
    "keep": {"reshard_after_forward": False},
    "bf16": {"mp_policy": fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
    "bf16_reduce": {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
    "fp16_reduce": {"mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float16)},
}
# Variants that differ elsewhere.
MORE = ["divide", "divide_by_size", "sum_only", "accumulate", "clip", "prefetch", "unused"]


def sharded(rank: Rank, variant: str, hybrid: bool = False, factor: float = 4) -> nn.Sequential:
    """Shard every block, then the rest. A `factor` divides gradients in place of the size."""
    mesh = grid(rank) if hybrid else init_device_mesh("cpu", (rank.size,))
    model, factor = net(), rank.size if variant == "divide_by_size" else factor
    for module in (model[1], model[2], model):
        fsdp.fully_shard(module, mesh=mesh, **FSDP2.get(variant, {}))
        if "divide" in variant:  # by PREMUL_SUM; by AVG where it is the size
            module.set_gradient_divide_factor(factor)
        # Gloo has no PREMUL_SUM: there, the sum is divided.
        if variant == "sum_only" or (variant == "divide" and dist.get_backend() == "gloo"):
            module.set_force_sum_reduction_for_comms(True)
        if variant == "prefetch":
            module.set_allocate_memory_from_process_group_for_comm(True)
    if variant == "prefetch":
        model[1].set_modules_to_forward_prefetch([model[2]])
        model[2].set_modules_to_backward_prefetch([model[1]])
    elif variant == "unused":
        model.set_reduce_scatter_unused_params(True)
    return model


def fsdp2(rank: Rank, variant: str, hybrid: bool = False) -> State:
    model = sharded(rank, variant, hybrid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: State = {}
    for step in range(STEPS):
        silent = variant == "accumulate" and step % 4 != 3
        if variant == "accumulate":  # in the grid, first within the shards only
            model.set_requires_gradient_sync(step % 4 > 1)
            model.set_requires_all_reduce(not silent)
            model.set_is_last_backward(not silent)
        model[2].idle = variant == "unused" and step % rank.size == rank.index
        loss_of(model, rank.index, step).backward()
        if silent:
            continue
        if variant == "clip":
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            state[f"norm {step}"] = norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.state_dict()) | flat(optimizer.state_dict(), "optimizer") | state


@pytest.mark.parametrize(
    "variant", forms([*FSDP2, *MORE], "plain", "bf16", "divide", "accumulate", "clip", "prefetch")
)
def test_fsdp2(pairs: dict[int, Pair], variant: str) -> None:
    pairs[2].check(fsdp2, variant)


@pytest.mark.parametrize(
    "variant", forms(["plain", "fp16_reduce", "clip", "accumulate"], "accumulate")
)
def test_fsdp2_hybrid(pairs: dict[int, Pair], variant: str) -> None:
    pairs[4].check(fsdp2, variant, True, rtol=RTOL)


def against_one(rank: Rank, hybrid: bool, factor: float | None) -> None:
    """Training on all ranks' batches in one process gives the same."""
    model, single = sharded(rank, "divide" if factor else "plain", hybrid, factor or 0), net()
    for step in range(STEPS):
        loss_of(model, rank.index, step).backward()
        for index in range(rank.size):
            (loss_of(single, index, step) / (factor or rank.size)).backward()
        with torch.no_grad():
            for parameter in (*model.parameters(), *single.parameters()):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    for ours, expected in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), expected, rtol=RTOL, atol=1e-6)


@pytest.mark.parametrize("factor", forms([None, 3.0], 3.0))
def test_fsdp2_equals_one_process(pairs: dict[int, Pair], factor: float | None) -> None:
    for size, hybrid in ((2, False), (4, False), (4, True)):
        pairs[size].ours(against_one, hybrid, factor)


def spread(rank: Rank) -> State:
    """Rank 0's state dict becomes everyone's shards, in a model that had no memory yet."""
    with torch.device("meta"):
        model = net()
    for module in (model[1], model[2], model):
        fsdp.fully_shard(module, mesh=init_device_mesh("cpu", (rank.size,)))
    model.to_empty(device="cpu")
    source = {name: value + 1 for name, value in net().state_dict().items()}
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, dict(source) if rank.index == 0 else {}, options=options)
    whole = states.get_model_state_dict(
        model, options=states.StateDictOptions(full_state_dict=True)
    )
    assert all(torch.equal(whole[name], value) for name, value in source.items())
    return flat(model.state_dict())


@pytest.mark.slow
def test_fsdp2_spreads_a_state(pairs: dict[int, Pair]) -> None:
    pairs[4].check(spread)


# ---- what came before DTensor


def gather_shards(rank: Rank) -> State:
    """Without a GPU it is to choose the CPU, where others look for a device of the group's."""
    placements = [f"rank:{r}/cpu" for r in range(rank.size)]
    whole = sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=placements), 6, 3)
    torch.manual_seed(rank.index)
    for shard in whole.local_shards():
        shard.tensor.copy_(torch.randn(shard.tensor.shape))
    out = torch.zeros(6, 3)
    whole.gather(0, out if rank.index == 0 else None)
    return {"out": out}


def test_sharded_tensor(pairs: dict[int, Pair]) -> None:
    pairs[2].check(gather_shards)
