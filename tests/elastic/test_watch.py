"""The leader of a world and the answers of those that want to join."""

from __future__ import annotations

from ringcomm.elastic.process import Process
from ringcomm.elastic.watch import without


def test_who_is_a_member_already_is_no_guest() -> None:
    """One answers each call until it has its welcome, so an answer may come after it was taken."""
    first, second = Process("a", "host", 1), Process("b", "host", 2)
    described = Process("b", "host", 2, card="as the store has it")
    assert without([first, second], (described,)) == [first]
    assert without([second], (first, described)) == []
