"""The errors of an elastic world. Each says in one sentence what happened and what to do."""

from __future__ import annotations

from ringcomm._runtime.process import say


class Evicted(RuntimeError):  # noqa: N818 - a state, by its name
    """The others go on without this rank. It must end; started anew, it may join them."""


class TooFew(RuntimeError):  # noqa: N818 - a state, by its name
    """Fewer members than `min_size` are left, and no others came within the `timeout` of `join`.

    Or no unit of a sharded model is whole, and some shard is in no rank's memory. Start more
    processes: the newest checkpoint is loaded once all have ended.
    """


class Diverged(RuntimeError):  # noqa: N818 - a state, by its name
    """Members hold different parameters, or count different steps. Nothing was applied.

    The text names the ranks that differ. The program has an error: each rank must do the same.
    """

    def __init__(self, text: str, what: str = "", ranks: tuple[int, ...] = ()) -> None:
        """`what` differs, as a field of ballots, at `ranks` from the others."""
        super().__init__(text)
        self.what, self.ranks = what, ranks


class Redo(BaseException):
    """Unwinds a step that is computed again; no handler of the user's is to catch it."""


class Spare(Exception):  # noqa: N818 - a state, by its name
    """The unit of this rank is broken: it waits as a guest until others complete one with it."""


class Over(SystemExit):
    """The world of this run has come to its end, and too few processes are here for another."""

    def __init__(self) -> None:
        say(
            "elastic: the world of this run has come to its end, so this process ends, too: to "
            "begin another, start as many as found one, or give it a name, RINGCOMM_ELASTIC_RUN"
        )
        super().__init__(0)


class Left(SystemExit):
    """A rank has left its world: its program ends in good order, with status 0."""

    def __init__(self) -> None:
        super().__init__(0)
