"""Which host this is: its name, and the ranks that share it, by the library's own rule."""

from __future__ import annotations

from ringcomm._runtime.library import load_library
from ringcomm._runtime.process import setting


def name() -> str:
    """Return what the library calls this host."""
    return str(setting("host") or load_library().host_identity()[0])


def key(rank: int) -> str:
    """Return what this rank has in common with those that share its host, and with no others.

    A rank that cannot show where it runs shares with none. Raises RuntimeError where nothing can be
    read.
    """
    library = load_library()
    mine = library.host_identity()
    if setting("transport") == "tcp" or not library.same_host(mine, mine):
        return str(rank)
    return " ".join(map(str, mine[1:]))
