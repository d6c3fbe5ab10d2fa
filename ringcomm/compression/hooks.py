"""Communication hooks for DistributedDataParallel that send gradients in fewer bytes.

    model = DistributedDataParallel(network)
    state = ringcomm.compression.hooks.register(model, "int8")

They need no NCCL: ringcomm and Gloo carry them. docs/compression.md says when that pays.
"""

import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringcomm.compression.codecs import BY_CHANCE, codec_of, mixed
from ringcomm.compression.exchange import Compression, Exchange, Memory
from ringcomm.compression.quantized import check_type

__all__ = ["CompressionState", "compress", "register"]

ERRORS = ("feedback", "unbiased", "drop")
"""Ways to treat the error that a gradient is rounded by."""

_REBUILT = 2  # DDP lays out its buckets anew in its second iteration, and then never again


class _Bucket(NamedTuple):
    parameters: list[torch.Tensor]
    memory: Memory


class CompressionState:
    """The state of the hook `compress`: how gradients are compressed, and what was left out so far.

    `format` is "int8", "fp8", "fp16" or "bf16". `error` says what becomes of what rounding leaves
    out: with "feedback" a rank adds it to the bucket's next gradient; with "unbiased" numbers are
    rounded up or down by chance, with `seed`, and are right on average; "drop" forgets it.
    `flat` quantises between the ranks of one host, too, which add up in fp32 otherwise.

    All ranks make it with the same arguments, one for each model. Feedback needs a number of fp32
    for each parameter, and a part of that for sums. `state_dict()` is of one rank, and has what a
    checkpoint needs.
    """

    def __init__(
        self,
        process_group: Any = None,
        format: str = "int8",
        *,
        error: str = "feedback",
        seed: int = 0,
        flat: bool = False,
    ) -> None:
        codec_of(format)
        if error not in ERRORS:
            raise ValueError(f"there is no error={error!r}: choose one of {', '.join(ERRORS)}")
        if error == "unbiased" and format not in BY_CHANCE:
            raise ValueError(f"{format} is rounded to the nearest: choose feedback or drop")
        self.format, self.error, self.seed, self.flat = format, error, seed, flat
        self._group = process_group
        self._begin()

    def _begin(self) -> None:
        self._exchange: Exchange | None = None
        self._calls = 0  # each call of this hook has its own chance
        self._iterations = 0  # by this reducer
        self._buckets: dict[int, _Bucket] = {}
        self._parameters: set[int] = set()  # of the model, by id; its first iteration has them all
        self._loaded: dict[int, dict[str, Any]] = {}

    @property
    def process_group(self) -> Any:
        """The group of the ranks. A new one, as an elastic world gives, begins without memory."""
        return dist.group.WORLD if self._group is None else self._group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self.close()
        self._group = group
        self._begin()

    def connect(self) -> Exchange:
        """Make the subgroups, if there are none yet; all ranks call it together."""
        if self._exchange is None:
            self._group = self.process_group  # from now on it is this one
            self._exchange = Exchange(
                self.process_group, flat=self.flat, format=self.format, error=self.error
            )
        return self._exchange

    def close(self) -> None:
        """End the subgroups; torch.distributed ends them when it ends, too."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has left out so far, bucket by bucket; ranks differ."""
        buckets = {
            index: {
                "shapes": [list(parameter.shape) for parameter in bucket.parameters],
                "own": bucket.memory.own,
                "sums": bucket.memory.sums,
            }
            for index, bucket in self._buckets.items()
        }
        return {"calls": self._calls, "buckets": {**buckets, **self._loaded}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, on as many ranks.

        What was left out is used from DDP's third iteration on. In its second one DDP lays out its
        buckets anew, and before that a bucket has other parameters.
        """
        self._iterations = 0
        self._buckets.clear()
        self._parameters.clear()
        self._calls = state["calls"]
        self._loaded = copy.deepcopy(dict(state["buckets"]))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is of this process: a copy is of the default group."""
        names = ("format", "error", "seed", "flat")
        return {name: getattr(self, name) for name in names} | self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            None, state["format"], error=state["error"], seed=state["seed"], flat=state["flat"]
        )
        self.load_state_dict(state)

    # ---- a bucket

    def _compression(self, bucket: Any) -> Compression:
        self._calls += 1
        memory = self._memory(bucket) if self.error == "feedback" else None
        seed = mixed(self.seed, self._calls) if self.error == "unbiased" else None
        if bucket.is_last():
            self._iterations += 1
            for index in [other for other in self._buckets if other > bucket.index()]:
                del self._buckets[index]  # DDP has fewer now
            if self._iterations > _REBUILT:
                self._loaded.clear()  # it was for other buckets than these
        divisor = dist.get_world_size(self.process_group)
        return Compression(codec_of(self.format), divisor, memory, seed)

    def _memory(self, bucket: Any) -> Memory:
        """Return what was left out of the same parameters; an empty one for other parameters.

        Raises RuntimeError for those of another model.
        """
        index, parameters = bucket.index(), bucket.parameters()
        known = self._buckets.get(index)
        if known is not None and _same(known.parameters, parameters):
            memory = known.memory
        else:
            mine = self._parameters.issuperset(map(id, parameters))
            if (self._iterations > 0 and not mine) or (self._iterations == 0 and known is not None):
                raise RuntimeError(
                    "this CompressionState is that of another model, and what is left out of one "
                    "belongs to its own parameters: make a state for each model"
                )
            self._parameters.update(map(id, parameters))
            memory = Memory()
        loaded = self._loaded.get(index)
        if loaded is not None and self._iterations >= _REBUILT:
            del self._loaded[index]
            if loaded["shapes"] == [list(parameter.shape) for parameter in parameters]:
                memory.own, memory.sums = loaded["own"], loaded["sums"]
        self._buckets[index] = _Bucket(parameters, memory)
        return memory


def _same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def compress(
    state: CompressionState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:  # DDP reads these types: no strings, then
    """Average a bucket of gradients over the ranks: `model.register_comm_hook(state, compress)`.

    All ranks get the same bits. A gradient with an inf or a NaN comes out so on all ranks, as
    GradScaler needs it.
    """
    buffer = bucket.buffer()
    check_type(buffer)
    future = state.connect().submit(buffer, state._compression(bucket))
    return future.then(lambda done: done.value())


def register(
    model: Any,
    format: str = "int8",
    *,
    error: str = "feedback",
    seed: int = 0,
    flat: bool = False,
) -> CompressionState:
    """Have a DistributedDataParallel send gradients so; return the state, for checkpoints.

    The arguments are those of CompressionState. All ranks call it together.
    """
    state = CompressionState(model.process_group, format, error=error, seed=seed, flat=flat)
    state.connect()
    model.register_comm_hook(state, compress)
    return state
