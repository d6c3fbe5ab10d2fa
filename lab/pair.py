"""For the tests of the stack above: a program run over ringcomm and over Gloo, compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lab.oracle import bits
from lab.ranks import Rank, Ranks

STEPS = 20

State = dict[str, torch.Tensor]
Program = Callable[..., State]


class Pair:
    """As many ranks over ringcomm as over Gloo."""

    def __init__(self, size: int) -> None:
        self.ours, self.gloos = Ranks(size), Ranks(size, "gloo")

    def check(self, program: Program, *args: Any, rtol: float = 0, seconds: float = 60) -> None:
        """Run `program(rank, *args)` on both; every rank's tensors are to be Gloo's.

        They are to be equal bit for bit, unless `rtol` states a relative tolerance. Over ringcomm,
        nothing else may have been made along the way.
        """
        here = self.ours(only_ours, program, *args, seconds=seconds)
        there = self.gloos(state_of, program, *args, seconds=seconds)
        for rank, (mine, other) in enumerate(zip(here, there, strict=True)):
            assert mine.keys() == other.keys()
            assert mine, "the program returned nothing to compare"
            for name, (digest, values) in mine.items():
                if rtol:
                    what = f"rank {rank}: {name}"
                    np.testing.assert_allclose(values, other[name][1], rtol, rtol, err_msg=what)
                else:
                    assert digest == other[name][0], f"rank {rank}: {name} differs"

    def leave(self) -> None:
        self.ours.leave()
        self.gloos.kill()  # Gloo's threads may still hold tensors: it is not asked to leave


def state_of(rank: Rank, program: Program, *args: Any) -> dict[str, tuple[str, np.ndarray]]:
    """Return the digests and values of the tensors that `program` returns."""
    state = program(rank, *args)
    dist.barrier()
    return {name: (bits(t), t.detach().float().numpy()) for name, t in state.items()}


def only_ours(rank: Rank, program: Program, *args: Any) -> dict[str, tuple[str, np.ndarray]]:
    state = state_of(rank, program, *args)
    assert other_backends(rank) == [], "another backend was made"
    return state


def other_backends(rank: Rank) -> list[str]:
    """Return the names of groups of other backends, and of Gloo's threads, in this process."""
    groups = [dist.get_backend(group) for group in dist.distributed_c10d._world.pg_map]
    threads = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return [name for name in groups if name != "ringcomm"] + [t for t in threads if "gloo" in t]
