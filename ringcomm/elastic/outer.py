"""DiLoCo in an elastic world: members train by themselves, and rounds average how far they moved.

Between rounds, parameters and inner optimizers differ. Equal on all members are the outer copy of
the parameters, the outer optimizer and the count of rounds: the world tracks these, and a round is
one of its steps, so every member applies it or none does. A round reads and writes the outer copy
alone. It runs in a thread, and inner steps may go on meanwhile.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.compression.exchange import all_gather_single
from ringcomm.elastic import ddp
from ringcomm.elastic.outer_codec import Codec, codec_for

Pair = tuple[Any, Any]  # a parameter of the model, and that of the outer copy


@dataclass(frozen=True)
class Terms:
    """The arguments of `World.outer` that say when rounds are, and what they send."""

    every: int | timedelta  # for the whole model: inner steps, or time
    bits: int
    topk: int | None
    fragments: int  # that take turns
    delay: int  # inner steps from the beginning of a round to the use of its result
    alpha: float  # the share of inner steps that went on meanwhile

    def __post_init__(self) -> None:
        """Raise ValueError for terms that cannot be."""
        if self.fragments < 1 or not 0 <= self.alpha <= 1:
            raise ValueError(
                f"fragments={self.fragments}, alpha={self.alpha}: at least 1, and from 0 to 1"
            )
        if isinstance(self.every, timedelta):
            if self.every <= timedelta(0) or self.delay:
                raise ValueError(
                    f"every={self.every}, delay={self.delay}: with a time above 0, rounds overlap "
                    "with inner steps by themselves, and delay stays 0"
                )
        elif self.every < 1 or self.every % self.fragments:
            raise ValueError(
                f"every={self.every}: a multiple of fragments={self.fragments}, at least 1"
            )
        elif not 0 <= self.delay < self.steps:
            raise ValueError(
                f"delay={self.delay}: less than the {self.steps} inner steps between two rounds"
            )

    @property
    def steps(self) -> int:
        """Inner steps between the beginnings of two rounds; 0 where time decides."""
        return 0 if isinstance(self.every, timedelta) else self.every // self.fragments

    @property
    def seconds(self) -> float:
        """From the end of a round to the beginning of the next one; 0 where steps decide."""
        if not isinstance(self.every, timedelta):
            return 0.0
        return self.every.total_seconds() / self.fragments

    @property
    def overlap(self) -> bool:
        """Whether inner steps go on during a round."""
        return self.delay > 0 or not self.steps

    def shared(self) -> dict[str, str]:
        """Return those that must be equal on all ranks."""
        names = ("every", "bits", "topk", "fragments")
        return {name: str(getattr(self, name)) for name in names}


class Contribution(NamedTuple):
    """A member's part in a round."""

    fragment: int
    weight: int  # the inner steps that it made since its last one
    moved: Tensor  # fp32[n]: the outer copy minus its parameters


class Outer:
    """The rounds of one member, which `World.outer` makes and describes.

    `model` is the outer copy, on the CPU, equal on all members: evaluate it, or save it. `steps`
    counts this member's inner steps, and `waited` the seconds in which these stood still for
    rounds.
    """

    def __init__(
        self,
        world: Any,
        model: nn.Module,
        optimizers: tuple[Any, Any],
        terms: Terms,
    ) -> None:
        self._world, self._inner_model, self._terms = world, model, terms
        self._codec = codec_for(terms.bits, terms.topk)
        inner, self._optimizer = optimizers
        self.model, pairs = _outer_copy(model, inner, self._optimizer)
        self._fragments = _cut(pairs, terms.fragments)
        self._left_out: dict[int, Tensor] = {}  # by fragment: what codes have left out so far
        self.steps = self._rounds = 0
        self._sent_at = [0] * terms.fragments  # by fragment: `steps` at its last round
        self._since = 0  # inner steps since the last round began
        self.waited = 0.0
        self._ended = 0.0  # when the last round ended
        self._round: Future[int] | None = None  # whose result is not used yet
        self._idle: Future[None] | None = None  # done when the thread has ended
        self._fragment = 0  # of the round under way
        inner.register_step_post_hook(self._after_inner_step)

    # ---- by the program's thread

    @property
    def rounds(self) -> int:
        """How many rounds this member's parameters have got, since the beginning of the training.

        `World.step_number` may be ahead, by the round that has ended in the background.
        """
        return self._rounds if self._idle is not None else int(self._world.step_number)

    def _begin(self) -> None:
        """Start from the outer copy of the world; one that joins takes part in a round first.

        Its weight there is 0. So it makes its first inner step as the others begin anew.
        """
        self._adopt()
        self._ended = time.monotonic()
        if not self._world._founder:
            self._send()
            self._use_result()
            self._adopt()
            self._since = self._terms.delay

    def wait(self) -> None:
        """Wait until no round is under way, and those that join in its wake have their state.

        Raises what ended the round: Evicted, TooFew, Diverged, or SystemExit after `world.leave()`.
        """
        if self._idle is not None:
            self._idle.result()

    def _adopt(self) -> None:
        """Have the outer copy's parameters and buffers in the model."""
        with torch.no_grad():
            for mine, outer in [pair for fragment in self._fragments for pair in fragment]:
                mine.copy_(outer)
            for mine, outer in self._buffers():
                mine.copy_(outer)

    def _buffers(self) -> list[Pair]:
        return list(zip(self._inner_model.buffers(), self.model.buffers(), strict=True))

    def _after_inner_step(self, *_: Any) -> None:
        began = time.monotonic()
        self._count_inner_step()
        self.waited += time.monotonic() - began

    def _count_inner_step(self) -> None:
        self.steps += 1
        self._since += 1
        if self._round is not None:
            if self._is_ripe(self._round):  # the program may call world.attempt before the next
                self._use_result()
        elif self._is_due():
            self._send()
            if not self._terms.overlap:
                self._use_result()

    def _is_due(self) -> bool:
        """Tell whether a round begins here: alike on all members, or by their clocks."""
        if self._terms.steps:
            return self._since >= self._terms.steps
        is_idle = self._idle is None or self._idle.done()
        return is_idle and time.monotonic() >= self._ended + self._terms.seconds

    def _is_ripe(self, under_way: Future[int]) -> bool:
        """Tell whether the result of the round is used here; if it isn't there yet, wait for it."""
        return self._since >= self._terms.delay if self._terms.steps else under_way.done()

    def _send(self) -> None:
        """Begin a round of the next fragment."""
        self.wait()
        self._fragment = fragment = self._world.step_number % self._terms.fragments
        with torch.no_grad():
            pairs = self._fragments[fragment]
            moved = torch.cat([(outer - mine.to(outer)).flatten().float() for mine, outer in pairs])
            for mine, outer in self._buffers():  # for those that join, and for checkpoints
                outer.copy_(mine)
        if not moved.isfinite().all():
            raise FloatingPointError(
                f"parameters are not finite after inner step {self.steps}: this member must end; "
                "started anew, it joins with those of the others"
            )
        weight = self.steps - self._sent_at[fragment]
        self._sent_at[fragment], self._since = self.steps, 0
        self._round, self._idle = Future(), Future()
        arguments = (Contribution(fragment, weight, moved), self._round, self._idle)
        name = "ringcomm-outer"
        threading.Thread(target=self._run, args=arguments, name=name, daemon=True).start()

    def _use_result(self) -> None:
        """Take over what the round led to, in part where inner steps went on meanwhile."""
        assert self._round is not None
        self._rounds = self._round.result()
        self._round = None
        with torch.no_grad():
            for mine, outer in self._fragments[self._fragment]:
                if self._terms.overlap:
                    mine.lerp_(outer.to(mine), 1 - self._terms.alpha)
                else:
                    mine.copy_(outer)

    # ---- by the thread of a round

    def _run(self, mine: Contribution, round: Future[int], idle: Future[None]) -> None:
        try:
            self._make_round(mine)
            self._ended = time.monotonic()
            round.set_result(self._world.step_number)
            self._world._assemble()  # those who join get the state now, in the background
            idle.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised in the program's thread
            for future in (round, idle):
                if not future.done():
                    future.set_exception(error)

    def _make_round(self, mine: Contribution) -> None:
        """Average, and make an outer step; once more with the same numbers when a member is lost.

        A step of the world ends its block by itself where it does not count.
        """
        data = mine.moved if self._codec is None else self._encode(self._codec, mine)
        counted = False
        while not counted:
            with self._world.step() as step:
                self._set_gradients(mine, self._average(mine, data))
                self._optimizer.step()
            counted = step.counted
        self._optimizer.zero_grad()

    def _encode(self, codec: Codec, mine: Contribution) -> Tensor:
        """Return the codes; what they leave out is added to the fragment's next numbers."""
        if mine.weight == 0:  # nobody decodes these, so they carry nothing
            return codec.encode(torch.zeros_like(mine.moved))
        total = mine.moved
        if mine.fragment in self._left_out:
            total = total + self._left_out[mine.fragment]
        codes = codec.encode(total)
        self._left_out[mine.fragment] = total - codec.decode(codes, total.numel())
        return codes

    def _average(self, mine: Contribution, data: Tensor) -> Tensor | None:
        """Return the mean over members, weighted by their inner steps; None where nobody made any.

        Every member decodes the same codes in the same order, so all get the same bits.
        """
        ranks = dist.get_world_size()
        weights = torch.empty(ranks, dtype=torch.int64)
        told = all_gather_single(weights, torch.tensor([mine.weight]), async_op=True)
        if self._codec is None:
            mean = data * float(mine.weight)
            dist.all_reduce(mean)
            told.wait()
            return mean / float(weights.sum()) if weights.any() else None
        every = torch.empty(ranks * data.numel(), dtype=torch.uint8)
        all_gather_single(every, data)
        told.wait()
        total, mean = float(weights.sum()), torch.zeros_like(mine.moved)
        for weight, codes in zip(weights.tolist(), every.view(ranks, -1), strict=True):
            if weight:
                numbers = self._codec.decode(codes, mean.numel())
                mean.add_(numbers, alpha=weight / total)
        return mean if total else None

    def _set_gradients(self, mine: Contribution, mean: Tensor | None) -> None:
        self._optimizer.zero_grad()
        if mean is None:
            return
        outers = [outer for _, outer in self._fragments[mine.fragment]]
        parts = mean.split([outer.numel() for outer in outers])
        for outer, part in zip(outers, parts, strict=True):
            outer.grad = part.view_as(outer).to(outer.dtype)


def start(
    world: Any, model: nn.Module, optimizers: tuple[Any, Any], terms: Terms, state: dict[str, Any]
) -> Outer:
    """Do what `World.outer` describes, with the inner and the outer optimizer."""
    outer = Outer(world, model, optimizers, terms)
    follower = Follower(outer, terms.shared())
    world.track(outer=outer.model, outer_opt=optimizers[1], outer_round=follower, **state)
    world._tracked.draws = False
    timeout = world._at.epochs.settings.timeout
    if terms.seconds >= timeout:
        raise ValueError(
            f"every={terms.every}: operations between ranks time out after {timeout:.0f} s: give "
            "elastic.join() options with a longer timeout"
        )
    outer._begin()
    return outer


class Follower:
    """Tracked beside the outer copy: when that was loaded, the model gets it, too.

    The terms have to be equal on all ranks: see `Tracked`.
    """

    def __init__(self, outer: Outer, terms: dict[str, str]) -> None:
        self._outer, self.ringcomm_terms = outer, terms

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._outer._adopt()


def _outer_copy(model: nn.Module, inner: Any, optimizer: Any) -> tuple[nn.Module, list[Pair]]:
    """Copy the model to the CPU, but for frozen parameters, and have the optimizer update that.

    Returns the copy, and its parameters in pairs with the model's. Raises TypeError and ValueError.
    """
    if ddp.wrappers_in([model]):
        raise TypeError("the model is in DDP, but inner steps are local: give the module itself")
    if optimizer.state:
        raise ValueError("the outer optimizer has made steps already: give a new one")
    trained = [p for p in model.parameters() if p.requires_grad]
    chosen, known = _parameters_of(optimizer), {id(p) for p in trained}
    if chosen != known or not _parameters_of(inner) <= known:
        raise ValueError(
            "the outer optimizer must have all parameters of the model that are trained, and the "
            "inner one no others"
        )
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    twins = {id(p): nn.Parameter(_on_cpu(p)) for p in trained}
    memo |= twins | {id(buffer): _on_cpu(buffer) for buffer in model.buffers()}
    outer = copy.deepcopy(model, memo)
    for group in optimizer.param_groups:
        group["params"] = [twins[id(p)] for p in group["params"]]
    return outer, [(p, twins[id(p)]) for p in trained]


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="cpu").copy_(tensor.detach())


def _cut(pairs: Sequence[Pair], count: int) -> list[list[Pair]]:
    """Cut parameters into fragments of about equal size, in their order. Raises ValueError."""
    if len(pairs) < count:
        raise ValueError(f"fragments={count}: the model has only {len(pairs)} parameters")
    total, before = sum(outer.numel() for _, outer in pairs), 0
    fragments: list[list[Pair]] = [[]]
    for index, pair in enumerate(pairs):
        missing = count - len(fragments)
        is_full = before * count >= total * len(fragments) or len(pairs) - index == missing
        if fragments[-1] and missing and is_full:
            fragments.append([])
        fragments[-1].append(pair)
        before += pair[1].numel()
    return fragments
