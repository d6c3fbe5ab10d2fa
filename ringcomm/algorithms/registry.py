"""Algorithms by hand that groups use by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from ringcomm._runtime.library import load_library
from ringcomm.algorithms.call import COLLECTIVES, Call
from ringcomm.algorithms.language import Algorithm
from ringcomm.algorithms.program import AlgorithmError
from ringcomm.algorithms.proof import SLOTS, Geometry, prove
from ringcomm.algorithms.schedule import Scripts, line_of, schedule

MOST_KEPT = 256  # scripts of all ranks


class Registered(NamedTuple):
    """An algorithm, and whether it is verified for each shape that it is first used for."""

    function: Algorithm
    verify: bool


_registered: dict[str, Registered] = {}
_made: dict[tuple[str, str], Scripts] = {}
_lock = threading.Lock()


def register_algorithm(
    name: str, function: Algorithm, collectives: Iterable[str], *, verify: bool = True
) -> None:
    """Have groups run `collectives` by an algorithm by hand, where they ask for `name`.

    They ask by `ringcomm.Options(algorithm=name)`, or RINGCOMM_ALGORITHM, as for the library's own
    algorithms. Every rank registers it, before its groups are made. `name` is a word of small
    letters, digits and underscores. An all_to_all with unequal parts keeps the library's algorithm.

    The plans are made, and with `verify` proved, where a shape is first used, and kept. A wrong
    algorithm raises in the collective, with its line. Ranks compare a hash of the plans of all
    ranks, so other code on one of them is an error on all. Raises ValueError for a name that is
    taken, or an unknown collective.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name):
        raise ValueError(f"{name!r} is no name: use small letters, digits and underscores")
    if not callable(function):
        raise ValueError(f"{name}: {function!r} is no function of a shape")
    wanted = [collectives] if isinstance(collectives, str) else list(collectives)
    for collective in wanted or [""]:
        if collective not in COLLECTIVES:
            known = ", ".join(COLLECTIVES)
            raise ValueError(f"{name}: there is no collective {collective!r}: use some of {known}")
    with _lock:
        load_library().register_algorithm(name, [*map(COLLECTIVES.index, wanted)])
        _registered[name] = Registered(function, verify)


def script_for(name: str, given: tuple[Any, ...], rank: int) -> tuple[list[int], int]:
    """Return the script of one rank, and the hash of all ranks'; the library calls this.

    `given` is a call, and last the geometry of the group's memory.
    """
    key = (name, repr(given))
    with _lock:
        scripts = _made.get(key)
    if scripts is None:
        scripts = _make(_registered[name], name, Call(*given[:-1]), given[-1])
        with _lock:
            while len(_made) >= MOST_KEPT:
                del _made[next(iter(_made))]
            _made[key] = scripts
    return scripts.ranks[rank].words, scripts.code


def _make(registered: Registered, name: str, call: Call, geometry: Geometry) -> Scripts:
    try:
        scripts = schedule(registered.function, call, geometry[SLOTS])
        if registered.verify:
            prove(geometry, scripts, f"by {name!r}")
    except AlgorithmError as error:
        file = line_of(registered.function).file
        function = getattr(registered.function, "__name__", "FUNCTION")
        raise AlgorithmError(
            f"{call.name} by {name!r}: {error}; `ringcomm plan verify {file}:{function} "
            f"{call.name} --ranks {call.ranks} --size {call.whole}` tells how",
            None,
            error.counterexample,
        ) from error
    return scripts
