"""State on its way to joiners: as tensors and a header, and in stripes from several ranks at once.

All tensors together are one stream of bytes. The ranks that have the state, the givers, each send a
stripe of it to each joiner, in pieces, straight from and into the tensors' memory. A checksum of
each stripe travels behind it.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ringcomm._runtime.library import load_library
from ringcomm.elastic import ddp
from ringcomm.elastic.shards import is_sharded, like, part_of

PIECE_BYTES = 4 << 20  # per message
SMALL_BYTES = 64 << 10  # tensors below it share messages
WINDOW = 4  # pieces under way between two ranks
HEADER_LIMIT = 1 << 30  # bytes
ALIGNMENT = 64  # borders between stripes are multiples of it
# These types need no look before they are sent.
PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
OTHER = "ringcomm.elastic.other"  # stands before the bytes of a value of another type
LEAF = "ringcomm.elastic.leaf"  # stands where a tensor was, before its number


class Leaf(NamedTuple):
    """A tensor as the header has it; `own` ones are those of the first giver alone."""

    dtype: str
    shape: list[int]
    strides: list[int]
    device: str
    own: bool

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape}" + ("" if self.device == "cpu" else f" on {self.device}")


@dataclass(frozen=True)
class Packed:
    """State as a header and its tensors' memory: uint8[n] each, the first giver's own in front."""

    header: bytes
    parts: list[Any]
    own_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(part.numel() for part in self.parts)


@dataclass
class StripePiece:
    """Bytes of one message: (part, begin, end) each, all on one kind of device."""

    segments: list[tuple[int, int, int]] = field(default_factory=list)
    total_bytes: int = 0


# ---- tensors as bytes


def _hash(tensor: Any) -> int:
    """64 bits of a contiguous tensor's bytes; a tensor of the CPU is read where it lies."""
    return int(load_library().checksum(tensor.detach().cpu().contiguous()))


def fold(first: int, second: int) -> int:
    """Return a checksum of two checksums, in this order."""
    return (first * 0x9E3779B97F4A7C15 + second + 1) % (1 << 64)


def is_dense(tensor: Any) -> bool:
    """Tell whether elements lie without gaps and overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def memory_of(tensor: Any) -> Any:
    """Return a tensor's elements as they lie, as uint8[n]; a copy if they have gaps."""
    bare = tensor.detach() if tensor.requires_grad else tensor
    if bare.is_contiguous():  # as nearly all: it is quicker
        return bare.view(-1).view(torch.uint8)
    dense = bare if is_dense(bare) else bare.contiguous()
    return torch.as_strided(dense, (dense.numel(),), (1,)).view(torch.uint8)


def leaf_of(tensor: Any, own: bool) -> Leaf:
    dense = tensor if is_dense(tensor) else tensor.contiguous()
    device = "cpu" if tensor.is_cpu else tensor.device.type
    return Leaf(_name_of(tensor.dtype), list(dense.shape), list(dense.stride()), device, own)


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def empty_for(leaf: Leaf) -> Any:
    dtype = getattr(torch, leaf.dtype)
    return torch.empty_strided(leaf.shape, leaf.strides, dtype=dtype, device=leaf.device)


# ---- the header


def flatten(value: Any, tensors: list[tuple[Any, bool]], own: bool) -> Any:
    """Add the tensors in dicts, lists and tuples to `tensors`; the result has their numbers."""
    if isinstance(value, torch.Tensor):
        value = part_of(value)
        if value.layout is not torch.strided:
            raise ValueError(f"it has a tensor of layout {value.layout}")
        tensors.append((value, own))
        return (LEAF, len(tensors) - 1)
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (dict, OrderedDict) and set(map(type, value)) <= PLAIN:
        return {key: flatten(item, tensors, own) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(flatten(item, tensors, own) for item in value)
    return (OTHER, _encode_other(value))


def fill(value: Any, tensors: list[Any]) -> Any:
    """Put tensors back where `flatten` took them."""
    if (number := _number_of(value)) is not None:
        return tensors[number]
    if type(value) is tuple and value[:1] == (OTHER,):
        return torch.load(io.BytesIO(value[1]), weights_only=True)
    if type(value) is dict:
        return {key: fill(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(fill(item, tensors) for item in value)
    return value


def encode(header: dict[str, Any]) -> bytes:
    """Encode plain data, and what `flatten` made."""
    return pickle.dumps(header, pickle.HIGHEST_PROTOCOL)


def decode(data: bytes) -> dict[str, Any]:
    """Read a header. Raises pickle.UnpicklingError for anything but data."""
    header: dict[str, Any] = _DataAlone(io.BytesIO(data)).load()
    return {**header, "leaves": [Leaf(*leaf) for leaf in header["leaves"]]}


class _DataAlone(pickle.Unpickler):
    """Knows no names but those of torch's types of data, so nothing that it reads runs code."""

    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(torch, name, None) if module == "torch" else None
        if isinstance(kind, torch.dtype) or kind in (torch.device, torch.Size):
            return kind
        raise pickle.UnpicklingError(f"the header has a {module}.{name}, which is not plain data")


def _encode_other(value: Any) -> bytes:
    """Encode a value of any other type. Raises ValueError unless torch can read it without code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it has a {kind[1]}" if kind else str(error).partition("\n")[0]
        raise ValueError(f"{what}, which is not plain data") from error
    return buffer.getvalue()


def pack(header: dict[str, Any], tensors: list[tuple[Any, bool]]) -> Packed:
    """Make the stream of what `flatten` found."""
    leaves = [leaf_of(tensor, own) for tensor, own in tensors]
    header = {**header, "leaves": [tuple(leaf) for leaf in leaves]}
    return stream(encode(header), leaves, [tensor for tensor, _ in tensors])


def stream(header: bytes, leaves: list[Leaf], tensors: list[Any]) -> Packed:
    """Return the memory of `tensors`, in the order that the leaves give on every rank."""
    order = sorted(range(len(leaves)), key=lambda index: not leaves[index].own)
    parts = [memory_of(tensors[index]) for index in order]
    own = sum(part.numel() for part, i in zip(parts, order, strict=True) if leaves[i].own)
    return Packed(header, parts, own)


# ---- the stream, cut up


def stripes(packed: Packed, count: int) -> list[tuple[int, int]]:
    """Cut the stream in `count` stripes, (begin, end) each; the first has all own bytes."""
    total, own = packed.total_bytes, packed.own_bytes
    even = [total * index // count // ALIGNMENT * ALIGNMENT for index in range(1, count)]
    return list(pairwise([0, *(max(own, cut) for cut in even), total]))


def pieces(packed: Packed, begin: int, end: int) -> list[StripePiece]:
    """Cut a stripe in pieces, the same on both sides: small tensors together, large ones alone."""
    small: list[StripePiece] = []
    large: list[StripePiece] = []
    filling: dict[str, StripePiece] = {}  # by kind of device
    sizes = [part.numel() for part in packed.parts]
    for index, upto in enumerate(accumulate(sizes)):
        offset = upto - sizes[index]
        low, high = max(begin - offset, 0), min(end, upto) - offset
        if high - low >= SMALL_BYTES:
            cuts = [*range(low, high, PIECE_BYTES), high]
            large += [StripePiece([(index, a, b)], b - a) for a, b in pairwise(cuts)]
        elif low < high:
            kind = packed.parts[index].device.type
            if kind not in filling or filling[kind].total_bytes >= PIECE_BYTES:
                filling[kind] = StripePiece()
                small.append(filling[kind])
            filling[kind].segments.append((index, low, high))
            filling[kind].total_bytes += high - low
    return small + large


# ---- on the way


def send(packed: Packed, group: Any, givers: list[int], joiners: list[int]) -> int:
    """Send this giver's stripe to each joiner; returns the bytes sent. Ranks are the group's.

    Reads the tensors only. Raises what the group raises when a rank dies: then nothing here has
    changed, and the transfer starts again over another group.
    """
    index = givers.index(group.rank())
    under_way: deque[tuple[Any, list[Any]]] = deque()
    sent = 0

    def finish() -> None:
        for work in under_way.popleft()[1]:
            work.wait()

    def post(data: Any) -> None:
        nonlocal sent
        while len(under_way) >= WINDOW:
            finish()
        tag = int(data.is_cuda)  # messages of the host may overtake those of a device
        works = [dist.isend(data, group=group, group_dst=rank, tag=tag) for rank in joiners]
        under_way.append((data, works))
        sent += data.numel() * data.element_size() * len(joiners)

    checksum = 0
    if index == 0:
        post(torch.tensor([len(packed.header)], dtype=torch.int64))
        post(_as_tensor(packed.header))
        checksum = _hash(_as_tensor(packed.header))
    for piece in pieces(packed, *stripes(packed, len(givers))[index]):
        views = [packed.parts[part][begin:end] for part, begin, end in piece.segments]
        data = views[0] if len(views) == 1 else torch.cat(views)
        post(data)
        checksum = fold(checksum, _hash(data))
    post(_as_tensor(checksum.to_bytes(8, "little")))
    while under_way:
        finish()
    return sent


def receive(
    unpack: Callable[[bytes], Packed],
    group: Any,
    givers: list[int],
    step: Callable[[], None] = lambda: None,
) -> Packed:
    """Receive state: `unpack` makes of the header what the stream is received into.

    `step` is called as the pieces come.
    Raises what the group raises when a giver dies, what `unpack` raises, and RuntimeError, which
    names the giver, if a stripe is not what was sent.
    """
    packed = unpack(_receive_header(group, givers[0]))
    cuts = stripes(packed, len(givers))
    inputs = [_Input(packed, group, rank, *cut) for rank, cut in zip(givers, cuts, strict=True)]
    inputs[0].checksum = _hash(_as_tensor(packed.header))
    waiting = inputs
    while waiting:  # all givers in turn, so that none waits for another
        waiting = [source for source in waiting if source.advance()]
        step()
    for index, source in enumerate(inputs):
        if bytes(source.told.tolist()) != source.checksum.to_bytes(8, "little"):
            raise RuntimeError(
                f"stripe {index + 1} of {len(givers)} of the state, from rank {givers[index]}, "
                "was changed on its way: join again"
            )
    return packed


class _Input:
    """The stripe that comes from one giver."""

    def __init__(self, packed: Packed, group: Any, giver: int, begin: int, end: int) -> None:
        self._parts, self._group, self._giver = packed.parts, group, giver
        self._pieces = iter(pieces(packed, begin, end))
        self._under_way: deque[tuple[Any, StripePiece, Any]] = deque()
        self.checksum = 0
        self.told = torch.zeros(8, dtype=torch.uint8)  # the giver's

    def advance(self) -> bool:
        """Ask for a piece, and wait for the oldest if enough are under way; False when all came."""
        if (piece := next(self._pieces, None)) is not None:
            self._ask(piece)
            if len(self._under_way) < WINDOW:
                return True
        elif not self._under_way:
            dist.irecv(self.told, group=self._group, group_src=self._giver).wait()
            return False
        self._take(*self._under_way.popleft())
        return True

    def _ask(self, piece: StripePiece) -> None:
        part, begin, end = piece.segments[0]
        data = self._parts[part][begin:end]
        if len(piece.segments) > 1:
            data = data.new_empty(piece.total_bytes)
        tag = int(data.is_cuda)
        work = dist.irecv(data, group=self._group, group_src=self._giver, tag=tag)
        self._under_way.append((data, piece, work))

    def _take(self, data: Any, piece: StripePiece, work: Any) -> None:
        work.wait()
        if len(piece.segments) > 1:
            sizes = [end - begin for _, begin, end in piece.segments]
            for (part, begin, end), view in zip(piece.segments, data.split(sizes), strict=True):
                self._parts[part][begin:end].copy_(view)
        self.checksum = fold(self.checksum, _hash(data))


def _receive_header(group: Any, giver: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64)
    dist.irecv(length, group=group, group_src=giver).wait()
    count = int(length.item())
    if not 0 < count <= HEADER_LIMIT:
        raise ValueError(f"the header of the state, from rank {giver}, has {count} bytes")
    data = torch.empty(count, dtype=torch.uint8)
    dist.irecv(data, group=group, group_src=giver).wait()
    return ctypes.string_at(data.data_ptr(), count)


def _as_tensor(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# ---- what objects have, and what they load


def flat_state(thing: Any, tensors: list[tuple[Any, bool]]) -> Any:
    """Return an object's state without its tensors, which are added to `tensors`."""
    module = ddp.unwrapped(thing)
    if isinstance(thing, torch.optim.Optimizer):
        _check_parts(thing)
        return flatten(thing.state_dict(), tensors, own=False)
    if not isinstance(module, nn.Module):
        return flatten(thing.state_dict(), tensors, own=True)
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    return {key: flatten(value, tensors, key not in shared) for key, value in state.items()}


def _check_parts(optimizer: Any) -> None:
    """Raise ValueError for state of which a joiner couldn't tell whether it is a DTensor.

    It takes that for one which has the shape of a DTensor parameter's part.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if is_sharded(parameter) else ():
            if isinstance(value, torch.Tensor) and is_sharded(value) != _is_part(value, parameter):
                raise ValueError(f"{key!r} is laid out in another way than its parameter")


def _is_part(value: Any, parameter: Any) -> bool:
    if not is_sharded(parameter) or not isinstance(value, torch.Tensor) or not value.dim():
        return False
    return bool(part_of(value).shape == part_of(parameter).shape)


def shapes_of(thing: Any) -> dict[str, list[int]]:
    """Return the shapes of an optimizer's parameters, by their places."""
    return {
        f"parameter {index} of group {number}": list(parameter.shape)
        for number, group in enumerate(getattr(thing, "param_groups", []))
        for index, parameter in enumerate(group["params"])
    }


def difference(
    thing: Any, state: Any, shapes: Any, leaves: list[Leaf], targets: dict[int, Any]
) -> str:
    """Say how an object differs from what the header has, or "". Changes `targets` only.

    A module's tensors become the targets of their leaves, if they lie alike.
    """
    ours = shapes_of(thing)
    for place in {**shapes, **ours}:
        if (there := shapes.get(place, "missing")) != (here := ours.get(place, "missing")):
            return f"{place} is {there} at the members and {here} here"
    module = ddp.unwrapped(thing)
    if not isinstance(module, nn.Module):
        return ""
    mine = {key: part_of(value) for key, value in module.state_dict().items()}
    for key in {**mine, **state}:
        if key not in mine or key not in state:
            return f"{key!r} is only {'here' if key in mine else 'at the members'}"
    for key, value in mine.items():
        number = _number_of(state[key])
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor != (number is not None):
            return f"{key!r} is a tensor only {'here' if is_tensor else 'at the members'}"
        if number is not None:
            leaf, own = leaves[number], leaf_of(value, own=False)
            if leaf[:2] != own[:2] or leaf.device != own.device:
                return f"{key!r} is {leaf} at the members and {own} here"
            if leaf.strides == own.strides and is_dense(value):
                targets[number] = value
    return ""


def _number_of(value: Any) -> int | None:
    is_leaf = type(value) is tuple and len(value) == 2 and value[0] == LEAF
    return int(value[1]) if is_leaf else None


def _is_same(value: Any, mine: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.data_ptr() == mine.data_ptr()


def load(thing: Any, state: Any) -> None:
    """Load what was received; a module's tensors may be in place already."""
    module = ddp.unwrapped(thing)
    if not isinstance(module, nn.Module):
        thing.load_state_dict(state)
    else:
        mine = module.state_dict()
        if not all(_is_same(value, part_of(mine[key])) for key, value in state.items()):
            module.load_state_dict(
                {k: like(v, mine[k]) if is_sharded(mine[k]) else v for k, v in state.items()}
            )
    if isinstance(thing, torch.optim.Optimizer):
        # load_state_dict gives state the type of the parameter: here it stays what it was.
        parameters = [p for group in thing.param_groups for p in group["params"]]
        for index, values in state["state"].items():
            for key, value in values.items() if isinstance(index, int) else ():
                if isinstance(value, torch.Tensor):
                    mine, parameter = thing.state[parameters[index]], parameters[index]
                    value = value.to(mine[key].device)  # those of a checkpoint are on the CPU
                    mine[key] = like(value, parameter) if _is_part(value, parameter) else value
