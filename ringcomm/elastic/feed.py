"""The batches of a loader that no decided step has used yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as tree

from ringcomm.elastic.sampler import Sampler, ahead_of


class Feed:
    """One iterator over a loader, for the whole run: workers and prefetched batches are kept."""

    def __init__(self, loader: Any, sampler: Sampler, accumulate: int) -> None:
        """Raises what `ahead_of` raises, and ValueError for a loader of another sampler."""
        self.ahead = ahead_of(loader, accumulate)
        if loader.batch_sampler is not sampler:
            raise ValueError("the loader has another sampler than the one given to world.track")
        self.loader = loader
        self._accumulate = accumulate
        self._sampler = sampler
        self._iterator: Iterator[Any] | None = None
        self._drawn: deque[Any] = deque()
        self._used = 0
        self._versions: list[tuple[torch.Tensor, int]] = []  # of the batches that were given

    def is_of(self, loader: Any, accumulate: int) -> bool:
        return self.loader is loader and self._accumulate == accumulate

    def batches(self) -> Any:
        """What a step gets: the same until it is decided. It is a list where it may be several."""
        sampler = self._sampler
        if self._iterator is None:
            self._iterator, self._used = iter(self.loader), sampler._used
        for _ in range(min(sampler._used - self._used, len(self._drawn))):
            self._drawn.popleft()
        self._used = sampler._used
        while len(self._drawn) < sampler._share:
            self._drawn.append(next(self._iterator))
        given = [self._drawn[index] for index in range(sampler._share)]
        tensors = [each for each in tree.tree_leaves(given) if isinstance(each, torch.Tensor)]
        self._versions = [(each, each._version) for each in tensors if not each.is_inference()]
        several = self._accumulate > 1 or sampler._deck.total_batch is not None
        return given if several else given[0]

    def check(self) -> None:
        """Raise RuntimeError if the program has changed a batch that may be needed once more."""
        if any(each._version != version for each, version in self._versions):
            raise RuntimeError(
                "a batch of world.batches was changed in place, and a step that is computed again "
                "needs it as it was: change a copy"
            )
