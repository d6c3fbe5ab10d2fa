"""Which ranks share a host: one rule, the library's, wherever Python asks."""

from __future__ import annotations

import os

import pytest

from ringcomm._runtime import host
from ringcomm._runtime.library import load_library


def test_ranks_of_a_host_have_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGCOMM_TRANSPORT", raising=False)
    assert host.key(0) == host.key(1) != "0"
    monkeypatch.setenv("RINGCOMM_TRANSPORT", "tcp")
    assert (host.key(0), host.key(1)) == ("0", "1")


def test_the_key_is_what_the_rule_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library()
    mine = library.host_identity()
    for place, other in enumerate(["another", "another", "another", os.geteuid() + 1]):
        theirs = (*mine[:place], other, *mine[place + 1 :])
        before = host.key(0)
        with monkeypatch.context() as there:
            there.setattr(library, "host_identity", lambda theirs=theirs: theirs)
            assert (host.key(0) == before) == library.same_host(mine, theirs)


@pytest.mark.parametrize("place", [1, 2])
def test_a_rank_that_cannot_tell_shares_with_none(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_library()
    mine = list(library.host_identity())
    mine[place] = "unknown"
    monkeypatch.setattr(library, "host_identity", lambda: tuple(mine))
    assert (host.key(3), host.key(4)) == ("3", "4")


def test_a_host_has_the_name_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGCOMM_HOST", raising=False)
    assert host.name() == load_library().host_identity()[0]
    monkeypatch.setenv("RINGCOMM_HOST", "node-3")
    assert host.name() == "node-3"
