"""DiLoCo in an elastic world: members train by themselves, and rounds average how far they moved.

Between rounds, parameters and inner optimizers differ. Equal on all members are the outer copy of
the parameters, the outer optimizer and the count of rounds: the world tracks these, and a round is
one of its steps, so every member applies it or none does. A round reads and writes the outer copy
alone. It runs in a thread, and inner steps may go on meanwhile.

A member may be a site of several ranks (outer_site.py). Inner steps are theirs together, and a
change of the world ends the operations of all groups, so no rank makes one during a round.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.compression.exchange import all_gather_single
from ringcomm.elastic import ddp
from ringcomm.elastic.outer_codec import Codec, codec_for
from ringcomm.elastic.outer_site import Site
from ringcomm.elastic.state import Tracked

# For a group with guests, which ask a store far away many things. Inner steps go on meanwhile.
GUESTS_SECONDS = 60.0
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
    anew: bool = False  # it has none, and begins with what the round leads to


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
        self._world, self._terms = world, terms
        self._codec = codec_for(terms.bits, terms.topk)
        self._inner, self._optimizer = optimizers
        self._site = Site(world._groups, model)
        if self._site.size > 1 and terms.overlap:
            raise ValueError(
                "a site of several ranks makes no inner steps during a round: give `every` as a "
                "number of steps, and no delay"
            )
        self._inner_model = model = ddp.unwrapped(model)
        self.model, pairs = _outer_copy(model, self._inner, self._optimizer)
        self._fragments = _cut(pairs, terms.fragments)
        self._left_out: dict[int, Tensor] = {}  # by fragment: what codes have left out so far
        self.steps = self._rounds = 0
        self._sent_at = [0] * terms.fragments  # by fragment: `steps` at its last round
        self._anew = False  # the next round is one that it begins anew with
        self._anew_at = 0  # `steps` at the last such round
        self._in_step = False  # the program is in the block of `step`
        self._since = 0  # inner steps since the last round began
        self.waited = 0.0
        self._ended = 0.0  # when the last round ended
        self._round: Future[int] | None = None  # whose result is not used yet
        self._idle: Future[None] | None = None  # done when the thread has ended
        self._mine: Contribution | None = None  # to the round whose result is not used yet
        self._inner.register_step_post_hook(self._after_inner_step)

    # ---- by the program's thread

    @property
    def rounds(self) -> int:
        """How many rounds this member's parameters have got, since the beginning of the training.

        `World.step_number` may be ahead, by the round that has ended in the background.
        """
        return self._rounds if self._idle is not None else int(self._world.step_number)

    def _begin(self) -> None:
        """Start from the outer copy of the world; one that joins takes part in a round first."""
        self._site.begin(self._world)
        self._ended = time.monotonic()
        if not self._world._founder:
            self._begin_anew()
            return
        if self._site.size > 1:
            self._world.attempt(self._share)
        self._adopt()

    def _share(self) -> None:
        """Have all ranks of a site begin with the same: each has it from another rank so far."""
        self._site.give_first([*self.model.parameters(), *self.model.buffers()])

    def _begin_anew(self) -> None:
        """Take part in a round with weight 0, and start with what it leads to.

        So its first inner step is made as the others make one after a round.
        """
        self._anew = True
        while self._anew:
            self._send()
            self._use_result()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose an inner step, from its forward pass on; a site of several ranks needs that.

        If a rank of the site is lost in it, the block ends. This rank then waits until the site is
        whole again, and begins anew: the inner optimizer's state is cleared, as a new rank has
        none. An inner step that another site's end has cut short does not count, either.
        """
        if self._anew:
            self._begin_anew()
        self._in_step = True
        try:
            yield
        except Exception as error:
            if self._site.size == 1 or not self._world._at.is_failure(error):
                raise
            self._recover(error)
        finally:
            self._in_step = False

    def _recover(self, error: Exception) -> None:
        """Meet the others because an inner step has failed: they come by with their next round."""
        with self._world.step():
            raise error
        if self._anew:
            self._begin_anew()

    def _follow_change(self, _: Any) -> None:
        """Called after each change of the world, on all ranks of a site."""
        inner_steps = self.steps - self._anew_at
        self._anew |= self._site.changed(self._world, (self._world.step_number, inner_steps))

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
        if self._site.size > 1 and not self._in_step:
            raise RuntimeError("a site of several ranks makes inner steps in `with outer.step():`")
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
        """Begin a round of the next fragment. A site of several ranks ends it, too."""
        self.wait()
        with torch.no_grad():
            for mine, outer in self._buffers():  # for those that join, and for checkpoints
                outer.copy_(mine)
        self._mine = self._nothing() if self._anew else self._contribution()
        self._round, self._idle = Future(), Future()
        if self._site.size > 1:
            self._run(self._round, self._idle)
            self.wait()
            return
        arguments, name = (self._round, self._idle), "ringcomm-outer"
        threading.Thread(target=self._run, args=arguments, name=name, daemon=True).start()

    def _next_fragment(self) -> int:
        return int(self._world.step_number % self._terms.fragments)

    def _contribution(self) -> Contribution:
        fragment = self._next_fragment()
        with torch.no_grad():
            pairs = self._fragments[fragment]
            moved = torch.cat([(outer - mine.to(outer)).flatten().float() for mine, outer in pairs])
        if not moved.isfinite().all():
            raise FloatingPointError(
                f"parameters are not finite after inner step {self.steps}: this member must end; "
                "started anew, it joins with those of the others"
            )
        weight = self.steps - self._sent_at[fragment]
        self._sent_at[fragment], self._since = self.steps, 0
        return Contribution(fragment, weight, moved)

    def _nothing(self) -> Contribution:
        """Return the part in a round with which this member begins anew."""
        fragment = self._next_fragment()
        count = sum(outer.numel() for _, outer in self._fragments[fragment])
        self._sent_at = [self.steps] * self._terms.fragments
        self._anew_at, self._since, self._anew = self.steps, 0, False
        self._left_out.clear()
        if self._site.size > 1:  # a mate may be new
            self._inner.state.clear()
        return Contribution(fragment, 0, torch.zeros(count), anew=True)

    def _use_result(self) -> None:
        """Take over what the round led to, in part where inner steps went on meanwhile."""
        assert self._round is not None
        assert self._mine is not None
        self._rounds = self._round.result()
        self._round = None
        if self._mine.anew:
            self._adopt()
            self._since = self._terms.delay
            return
        with torch.no_grad():
            for mine, outer in self._fragments[self._mine.fragment]:
                if self._terms.overlap:
                    mine.lerp_(outer.to(mine), 1 - self._terms.alpha)
                else:
                    mine.copy_(outer)

    # ---- by the thread of a round

    def _run(self, round: Future[int], idle: Future[None]) -> None:
        try:
            self._make_round()
            self._ended = time.monotonic()
            round.set_result(self._world.step_number)
            self._world._assemble()  # those who join get the state now, in the background
            idle.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised in the program's thread
            for future in (round, idle):
                if not future.done():
                    future.set_exception(error)

    def _make_round(self) -> None:
        """Average, and make an outer step; once more with the same numbers when a member is lost.

        A step of the world ends its block by itself where it does not count.
        """
        counted, sent = False, None
        while not counted:
            if self._anew:  # this site has changed
                self._mine = self._nothing()
            mine = self._mine
            assert mine is not None
            if mine is not sent:
                sent, data = mine, self._encode(mine)
            with self._world.step() as step:
                self._set_gradients(mine, self._average(mine, data))
                self._optimizer.step()
            counted = step.counted
        self._optimizer.zero_grad()

    def _encode(self, mine: Contribution) -> Tensor:
        """Return this rank's share, or its codes, which leave some for the fragment's next ones."""
        codec, total = self._codec, self._site.share_of(mine.moved)
        if codec is None:
            return total
        if mine.weight == 0:  # nobody decodes these, so they carry nothing
            return codec.encode(torch.zeros_like(total))
        if mine.fragment in self._left_out:
            total = total + self._left_out[mine.fragment]
        codes = codec.encode(total)
        self._left_out[mine.fragment] = total - codec.decode(codes, total.numel())
        return codes

    def _average(self, mine: Contribution, data: Tensor) -> Tensor | None:
        """Return the mean over members, weighted by their inner steps; None where nobody made any.

        Every member decodes the same codes in the same order, so all get the same bits.
        """
        group, count = self._site.across, mine.moved.numel()
        ranks = dist.get_world_size(group)
        weights = torch.empty(ranks, dtype=torch.int64)
        weight = torch.tensor([mine.weight])
        told = all_gather_single(weights, weight, group=group, async_op=True)
        if self._codec is None:
            mean = data * float(mine.weight)
            dist.all_reduce(mean, group=group)
            told.wait()
            mean /= float(weights.sum().clamp(min=1))
        else:
            every = torch.empty(ranks * data.numel(), dtype=torch.uint8)
            all_gather_single(every, data, group=group)
            told.wait()
            mean = self._decoded(self._codec, every.view(ranks, -1), weights, count)
        return self._site.whole(mean, count) if weights.any() else None

    def _decoded(self, codec: Codec, every: Tensor, weights: Tensor, count: int) -> Tensor:
        """Return the mean of the numbers that the codes of all members stand for."""
        total, mean = float(weights.sum()), torch.zeros(-(-count // self._site.size))
        for weight, codes in zip(weights.tolist(), every, strict=True):
            if weight:
                mean.add_(codec.decode(codes, mean.numel()), alpha=weight / total)
        return mean

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
    _refuse(state, optimizers[0])
    settings = world._entrance.settings
    timeout, settings = settings.timeout, replace(settings, guests=GUESTS_SECONDS)
    if terms.seconds >= timeout:
        raise ValueError(
            f"every={terms.every}: operations between ranks time out after {timeout:.0f} s: give "
            "elastic.join() options with a longer timeout"
        )
    world._entrance.settings = settings
    if world._changes is not None:
        world._changes.epochs.settings = settings
    outer = Outer(world, model, optimizers, terms)
    follower = Follower(outer, terms.shared())
    world.on_change(outer._follow_change)
    things = {"outer": outer.model, "outer_opt": optimizers[1], "outer_round": follower, **state}
    world._track(Tracked(**things))
    world._tracked.draws = False
    outer._begin()
    return outer


def _refuse(state: dict[str, Any], inner: Any) -> None:
    """Raise ValueError for what goes with inner steps: they are each member's own."""
    for name, thing in state.items():
        if getattr(thing, "optimizer", None) is inner or isinstance(thing, torch.amp.GradScaler):
            raise ValueError(
                f"{name!r} goes with the inner optimizer, whose steps are each member's own, but "
                "what is tracked is equal on all members: leave it out, and go by outer.rounds"
            )


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

    Returns the copy, and its parameters in pairs with the model's. Raises ValueError.
    """
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
