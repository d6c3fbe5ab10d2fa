"""The state of a training loop: put back for a step that is computed again, packed for joiners."""

from __future__ import annotations

import ctypes
import gc
import operator
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ringcomm._runtime.process import say
from ringcomm.elastic import ddp, transfer
from ringcomm.elastic.averages import Averages
from ringcomm.elastic.shards import Shards, part_of
from ringcomm.elastic.transfer import Packed

if TYPE_CHECKING:
    from ringcomm.elastic.unit_groups import UnitGroups


_Rates = tuple[list[Any], list[Any]]  # states of schedulers, and options of optimizers


class Stateful(Protocol):
    """An object with state: a module, an optimizer, a scheduler, or something like them."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Tracked:
    """All that a step changes, by name.

    `mark` at the beginning of a step and `restore` before it is computed again are for what comes
    before the optimizer's step: buffers, random numbers, gradients, and what schedulers and scalers
    write. `keep_for_undo` and `undo` are for the optimizer's step. Other objects may change only
    after it.

    Whatever the program changes between a step that did not count and its repetition is a part of
    that step: from `leave_out` on averages stay as they are, and `begin_again` puts back what
    schedulers did there. What callbacks and other ranks gave meanwhile stays: see `keep_rates`.
    """

    def __init__(self, groups: UnitGroups | None = None, /, **objects: Stateful) -> None:
        """Sort the objects out by kind. `groups` are those of the units that shard models.

        Raises TypeError for an object without state, and for one whose shards die with their rank;
        ValueError for what no change of ranks survives, or cannot be sent to joiners.
        """
        for name, thing in objects.items():
            for method in ("state_dict", "load_state_dict"):
                if isinstance(thing, torch.Generator):
                    continue
                if not callable(getattr(thing, method, None)):
                    kind = type(thing).__name__
                    raise TypeError(f"{name!r} is a {kind} without {method}(), so it has no state")
            ddp.refuse(name, thing)
        self.objects: dict[str, Any] = {
            name: Generator(thing) if isinstance(thing, torch.Generator) else thing
            for name, thing in sorted(objects.items())
        }
        things = list(self.objects.values())
        self.wrappers: list[Any] = ddp.wrappers_in(things)
        self.modules: list[Any] = [ddp.unwrapped(o) for o in things if isinstance(o, nn.Module)]
        self.optimizers = [o for o in things if isinstance(o, torch.optim.Optimizer)]
        self.scalers = [o for o in things if isinstance(o, torch.amp.GradScaler)]
        self.schedulers = [o for o in things if _is_scheduler(o)]
        samplers = [name for name, thing in self.objects.items() if hasattr(thing, "_decide")]
        if len(samplers) > 1:
            raise ValueError(
                f"{' and '.join(samplers)} are elastic samplers: a world trains on one; validate "
                "in world.attempt, on every world.size-th sample from world.rank on"
            )
        self.sampler: Any = self.objects[samplers[0]] if samplers else None
        parameters = {id(p): p for module in self.modules for p in module.parameters()}
        self.parameters: list[Any] = list(parameters.values())
        self._buffers = _Buffers(self.modules)
        self._by_hand = _ByHand(self.parameters, self.optimizers)
        self.generators = [o for o in things if isinstance(o, Generator)]
        self._random = _Random(self.generators)
        self.averages = Averages(things)
        self.shards = Shards(
            {name: o for name, o in self.objects.items() if isinstance(o, nn.Module)}, groups
        )
        self.draws = True  # False: random numbers are for what goes on beside the steps
        self._rates_again: _Rates | None = None  # of a step that did not count, and comes again
        self._undo: dict[int, _Undo] = {}
        self._marked: list[Any] = []
        self._incoming: tuple[dict[str, Any], list[Any]] | None = None
        self.pack()  # raises here, on every rank, for what a joiner could not load

    def signature(self) -> str:
        """Return names and kinds, to compare between ranks: "model: Net, opt: AdamW"."""
        return _listed(self._kinds())

    def _terms(self) -> dict[str, str]:
        """Return what has to be equal on all ranks for their operations to fit together."""
        terms = {"version of torch": str(torch.__version__)}
        for name, thing in self.objects.items():
            if isinstance(thing, nn.Module):
                frozen = [n for n, p in thing.named_parameters() if not p.requires_grad]
                terms[f"frozen parameters of {name!r}"] = ", ".join(frozen) or "none"
            for wrapper in ddp.wrappers_in([thing]):
                for what, value in ddp.layout_of(wrapper).items():
                    terms[f"{what} of DDP in {name!r}"] = value
            terms |= getattr(thing, "ringcomm_terms", {})  # those of outer.py
        return terms

    def _kinds(self) -> dict[str, str]:
        return {name: type(thing).__name__ for name, thing in self.objects.items()}

    # ---- a step that is computed again

    def mark(self, *, parameters: bool = False) -> None:
        """Copy what a step changes before its optimizer's; with `parameters` all of them, too.

        Raises RuntimeError inside `DistributedDataParallel.join()`.
        """
        for wrapper in self.wrappers:
            ddp.check_step(wrapper)
        if self.draws:
            self._random.mark()
        self._buffers.mark()
        self._by_hand.mark(everything=parameters)
        without = [parameter.grad is None for parameter in self.parameters]
        scalers = [_copied((s._scale, s._growth_tracker)) for s in self.scalers]
        self._marked = [without, scalers, self._rates()]

    def restore(self) -> None:
        """Put back exactly what `mark` copied; any number of times.

        A gradient that was None at the mark is None again, any other is filled with zeros. So
        gradients are accumulated within one step of the world, never over several.
        """
        if not self._marked:
            raise RuntimeError("restore() without mark(): no step has begun")
        without, scalers, rates = self._marked
        self.shards.reset()
        if self.draws:
            self._random.restore()
        self._buffers.restore()
        self._by_hand.put_back()
        for parameter, was_none in zip(self.parameters, without, strict=True):
            if was_none:
                parameter.grad = None
            elif parameter.grad is not None:
                part_of(parameter.grad).detach().zero_()
        for scaler, state in zip(self.scalers, scalers, strict=True):
            scaler._scale, scaler._growth_tracker = _copied(state)
            scaler._per_optimizer_states.clear()  # what unscale_() noted in this step
        self._put_rates(self._rates_again or rates)

    def leave_out(self) -> None:
        """Leave out what the program does from now on until the step comes that did not count."""
        self.averages.drop()
        self._rates_again = self._rates()

    def keep_rates(self) -> None:
        """Have schedulers and options come again as they are now, if a step comes again."""
        if self._rates_again is not None:
            self._rates_again = self._rates()

    def begin_again(self) -> None:
        """Put back what the program did after a step that did not count, before it comes again."""
        if self._rates_again is None:
            return
        rates, self._rates_again = self._rates_again, None
        self.averages.begin_again()
        self._put_rates(rates)

    def _rates(self) -> _Rates:
        schedulers = [_copied(scheduler.state_dict()) for scheduler in self.schedulers]
        return schedulers, [_options(optimizer) for optimizer in self.optimizers]

    def _put_rates(self, rates: _Rates) -> None:
        for scheduler, state in zip(self.schedulers, rates[0], strict=True):
            scheduler.load_state_dict(_copied(state))
        for optimizer, options in zip(self.optimizers, rates[1], strict=True):
            _put_options(optimizer, options)

    # ---- an optimizer's step that is taken back

    def changed_by_optimizers(self) -> list[Any]:
        """Return the tensors that nothing changes between steps of optimizers."""
        return [tensor for optimizer in self.optimizers for tensor in _changed_by(optimizer)]

    def keep_for_undo(self, optimizer: Any) -> None:
        """Copy an optimizer's parameters and state, before a step that `undo` may take back."""
        self._undo.setdefault(id(optimizer), _Undo(optimizer)).keep()

    def undo(self) -> None:
        """Put back exactly what was kept: parameters, state and options. Gradients stay."""
        for kept in self._undo.values():
            kept.put_back()

    def forget_undo(self, *, free: bool = False) -> None:
        """Stay where the steps since `keep_for_undo` led.

        Its memory serves the next one, unless it is to be `free`.
        """
        if free:
            self._undo.clear()
        for kept in self._undo.values():
            kept.active = False

    # ---- comparing and sending

    def fingerprint(self, *, buffers: bool = False) -> int:
        """Return 64 bits of all parameters, which are equal on all ranks after a step.

        With `buffers`, of these too; they may differ between ranks, as BatchNorm's do.
        """
        tensors = list(self.parameters)
        if buffers:
            tensors += [buffer for module in self.modules for buffer in module.buffers()]
        result = 0
        for tensor in tensors:
            result = transfer.fold(result, transfer._hash(transfer.memory_of(part_of(tensor))))
        return result

    def pack(self, more: dict[str, Any] | None = None) -> Packed:
        """Return the whole state, over the tensors' own memory: it is what it is when it is sent.

        Its header has `more`, too.

        Parameters and optimizers are equal on all ranks, so each giver sends a part of them; all
        else comes from the first. Raises ValueError for what is neither tensors nor plain data.
        """
        header: dict[str, Any] = {
            "kinds": self._kinds(),
            "states": {},
            "shapes": {},
            **(more or {}),
        }
        header["terms"] = self._terms()
        tensors: list[tuple[Any, bool]] = []
        with _no_collection():
            for name, thing in self.objects.items():
                try:
                    header["states"][name] = transfer.flat_state(thing, tensors)
                except ValueError as error:
                    what = f"state of {name!r} cannot be sent to joiners: {error}"
                    raise ValueError(what) from error
                header["shapes"][name] = transfer.shapes_of(thing)
            return transfer.pack(header, tensors)

    def unpack(self, header: bytes) -> Packed:
        """Return memory for a joiner's state: its modules' own tensors, and new ones for the rest.

        Raises ValueError with the first difference, before anything is changed.
        """
        told = transfer.decode(header)
        if told.get("kinds") != self._kinds():
            raise ValueError(
                f"the members have {_listed(told.get('kinds', {}))}, and this rank has "
                f"{self.signature()}: every rank needs the same things"
            )
        theirs, mine = told.get("terms", {}), self._terms()
        for what in {**theirs, **mine}:
            there, here = (terms.get(what, "missing") for terms in (theirs, mine))
            if there != here:
                raise ValueError(
                    f"{what}: {there} at the members and {here} here: give every rank the same"
                )
        targets: dict[int, Any] = {}
        for name, thing in self.objects.items():
            state, shapes = told["states"][name], told["shapes"][name]
            if difference := transfer.difference(thing, state, shapes, told["leaves"], targets):
                raise ValueError(f"state of {name!r} cannot be loaded: {difference}")
        received = [
            targets[index] if index in targets else transfer.empty_for(leaf)
            for index, leaf in enumerate(told["leaves"])
        ]
        self._incoming = (told["states"], received)
        return transfer.stream(header, told["leaves"], received)

    def finish(self) -> None:
        """Load what was received since `unpack`: modules, then the rest, optimizers last."""
        if self._incoming is None:
            raise RuntimeError("finish() without unpack(): no state was received")
        states, tensors = self._incoming
        self._incoming = None
        last = [name for name, thing in self.objects.items() if thing in self.optimizers]
        for name in [name for name in self.objects if name not in last] + last:
            transfer.load(self.objects[name], transfer.fill(states[name], tensors))
        self._by_hand.forget()
        self.keep_rates()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Have Python look for no garbage meanwhile.

    Thousands of small objects make it do so, and in a process with torch that takes 0.2 s, for
    which all members would wait.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _listed(kinds: dict[str, str]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in kinds.items())


def _is_scheduler(thing: object) -> bool:
    """Tell whether its state is small, and it may be called before the optimizer's step."""
    known = isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
    return known or (hasattr(thing, "optimizer") and hasattr(thing, "step"))


# ---- copies that are put back


def _copied(value: Any) -> Any:
    """A copy that no later change reaches: of dicts, lists, tuples and tensors."""
    if isinstance(value, torch.Tensor):
        return part_of(value).detach().clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([_copied(item) for item in value])
    return value


class _Copies:
    """Copies of tensors, in memory that stays while shapes and kinds do."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        self._live: list[Any] = []
        self._kept: list[Any] = []
        self._sharded = False

    def take(self, tensors: list[Any]) -> None:
        same = len(tensors) == len(self._tensors)
        if not same or not all(map(operator.is_, tensors, self._tensors)) or self._sharded:
            old = iter(self._kept)
            self._tensors = tensors
            parts = list(map(part_of, tensors))  # FSDP may move them to other memory
            self._sharded = any(map(operator.is_not, parts, tensors))
            tensors = parts
            # One whose elements share memory, as an expanded one, cannot be written to at all.
            self._live = [t for t in tensors if 0 not in t.stride() or t.is_contiguous()]
            self._kept = [_fitting(tensor, next(old, None)) for tensor in self._live]
        self._copy(self._kept, self._live)

    def put_back(self) -> None:
        self._copy(self._live, self._kept)

    def _copy(self, into: list[Any], tensors: list[Any]) -> None:
        if not tensors:
            return
        records = any(tensor.requires_grad for tensor in self._live)  # buffers do not: it is dear
        with torch.no_grad() if records else nullcontext():
            torch._foreach_copy_(into, tensors)


class _ByHand:
    """The parameters that the program itself changes in a step, as those of a momentum encoder.

    No tracked optimizer has them. Others that none has are frozen, and often many: only those are
    copied that have changed in a step before.
    """

    def __init__(self, parameters: list[Any], optimizers: list[Any]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        owned = {id(p) for group in groups for p in group["params"]}
        self._all, self._always = parameters, not optimizers
        self._free = [p for p in parameters if id(p) not in owned and part_of(p) is p]
        self._changed = [False] * len(self._free)
        self._seen: list[tuple[int, int]] = []
        self._learns = False  # what changes now changes in a step
        self._copies = _Copies()

    def mark(self, *, everything: bool) -> None:
        self._learn()
        self._seen, self._learns = self._look(), not everything
        changed = [p for p, moves in zip(self._free, self._changed, strict=True) if moves]
        self._copies.take(self._all if everything or self._always else changed)

    def put_back(self) -> None:
        if self._learn() and not self._always:
            say(
                "WARNING elastic: a step that is computed again had changed parameters that no "
                "tracked optimizer has: this once they change twice, later they are put back"
            )
        self._copies.put_back()
        self._seen = self._look()

    def forget(self) -> None:
        """Go on from values that were loaded."""
        self._seen = []

    def _learn(self) -> bool:
        """Note which have changed since the mark; tells whether any had not been seen to before."""
        if not self._learns or not self._seen:
            return False
        pairs = zip(self._seen, self._look(), strict=True)
        before, moved = self._changed, [seen != now for seen, now in pairs]
        self._changed = [a or b for a, b in zip(before, moved, strict=True)]
        return self._changed != before

    def _look(self) -> list[tuple[int, int]]:
        return [(p.data_ptr(), p._version) for p in self._free]


def _fitting(tensor: Any, old: Any) -> Any:
    """Memory for a copy: the old one if it is of that kind."""
    kinds = [(t.shape, t.dtype, t.device) for t in (tensor, old) if t is not None]
    return old if kinds[1:] == kinds[:1] else torch.empty_like(tensor, requires_grad=False)


class _Buffers:
    """The buffers of modules: which tensors they are, and what is in them."""

    def __init__(self, modules: list[Any]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._dicts = [part._buffers for part in parts.values()]
        self._held: list[dict[str, Any]] = []
        self._copies = _Copies()

    def mark(self) -> None:
        self._held = [dict(buffers) for buffers in self._dicts]
        self._copies.take([t for held in self._held for t in held.values() if t is not None])

    def restore(self) -> None:
        for buffers, held in zip(self._dicts, self._held, strict=True):
            buffers.clear()
            buffers.update(held)
        self._copies.put_back()


def _options(optimizer: Any) -> list[dict[str, Any]]:
    """An optimizer's options, as learning rates: each as it is, and its copy."""
    return [
        {key: (value, _copied(value)) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _put_options(optimizer: Any, options: list[dict[str, Any]]) -> None:
    for group, kept in zip(optimizer.param_groups, options, strict=True):
        for key in group.keys() - kept.keys() - {"params"}:
            del group[key]
        group.update({key: _put(*pair) for key, pair in kept.items()})


def _put(value: Any, copy: Any) -> Any:
    """A value as it was when copied; a tensor stays the same object."""
    if isinstance(value, torch.Tensor):
        return value.detach().copy_(copy) if value.requires_grad else value.copy_(copy)
    return _copied(copy)


class _Undo:
    """Copies of everything that an optimizer's step changes."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._copies = _Copies()
        self._states: dict[Any, dict[str, Any]] = {}
        self._options: list[dict[str, Any]] = []
        self.active = False

    def keep(self) -> None:
        optimizer = self._optimizer
        self._states = {key: _apart(state) for key, state in optimizer.state.items()}
        self._copies.take(_changed_by(optimizer))
        self._options = _options(optimizer)
        self.active = True

    def put_back(self) -> None:
        if not self.active:
            return
        self.active = False
        for key in [key for key in self._optimizer.state if key not in self._states]:
            del self._optimizer.state[key]
        for key, kept in self._states.items():
            self._optimizer.state[key].clear()
            self._optimizer.state[key].update(kept)
        self._copies.put_back()
        _put_options(self._optimizer, self._options)


def _changed_by(optimizer: Any) -> list[Any]:
    """Return the tensors that an optimizer's step changes, beside its options."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    states = optimizer.state.values()
    return tensors + [v for s in states for v in s.values() if isinstance(v, torch.Tensor)]


def _apart(state: dict[str, Any]) -> dict[str, Any]:
    """State whose tensors are copied elsewhere."""
    return {k: v if isinstance(v, torch.Tensor) else _copied(v) for k, v in state.items()}


# ---- random numbers


class Generator:
    """A generator of the program's own, as an object with state. All ranks draw alike from it."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"device": str(self._generator.device), "state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["state"].cpu())


class _Random:
    """The generators that a step may draw from: torch's, Python's, NumPy's, and tracked ones."""

    def __init__(self, tracked: list[Generator]) -> None:
        self._tracked = tracked
        self._own: list[dict[str, Any]] = []
        self._states: tuple[Any, Any, Any] = (None, None, None)
        self._numpy: Any = None
        self._numpy_at: tuple[Any, int] = (None, 0)  # a generator, and where its state lies
        self._numpy_bits: bytes | None = None

    def mark(self) -> None:
        self._own = [generator.state_dict() for generator in self._tracked]
        device = _cuda_generator()
        self._states = (
            torch.default_generator.get_state(),
            device and device.get_state(),
            random.getstate(),
        )
        if numpy := sys.modules.get("numpy.random"):
            self._mark_numpy(numpy)

    def _mark_numpy(self, numpy: Any) -> None:
        """Copy NumPy's state, in 30 us, if it may have changed; to see that takes 1 us.

        The normal number that it may hold back is given out without a change of the bits.
        """
        bits = None
        generator = numpy.get_bit_generator()
        if isinstance(generator, numpy.MT19937):
            if generator is not self._numpy_at[0]:
                self._numpy_at = generator, generator.ctypes.state_address
            bits = ctypes.string_at(self._numpy_at[1], 2500)  # key[624], position
        if bits is None or bits != self._numpy_bits or self._numpy["has_gauss"]:
            self._numpy = numpy.get_state(legacy=False)
            known = bits is not None and bits[:2496] == self._numpy["state"]["key"].tobytes()
            self._numpy_bits = bits if known else None

    def restore(self) -> None:
        cpu, device, python = self._states
        torch.default_generator.set_state(cpu)
        if device is not None:
            _cuda_generator().set_state(device)
        random.setstate(python)
        for generator, state in zip(self._tracked, self._own, strict=True):
            generator.load_state_dict(state)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def _cuda_generator() -> Any:
    """The current device's, if CUDA is in use."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]
