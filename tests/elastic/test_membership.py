"""The rules of membership, in virtual time: see lab/membership.py."""

from __future__ import annotations

import pytest
from conftest import forms

from lab.membership import failing_seed, shows
from lab.membership_rules import RULES

ENOUGH = 1000  # seeds, in which most rules are missed that are left out
MORE = 200  # seeds from a rarer one on
# Rules, and a seed that has shown that they are missing, or one shortly before. Any change of the
# simulated code may give a seed another course, so the search goes on from there.
SHOWN = {
    "whole": 0,
    "drop": 0,
    "over": 1,
    "succeed": 1,
    "patient": 3,
    "gone": 4,
    "confirm": 6,
    "signs": 10,
    "pieces": 9,
    "together": 9,
    "usual": 21,
    "bars": 32,
    "lapse": 33,
    "founds": 63,
    "progress": 46,
    "forgive": 148,
    "recombine": 136,
    "probation": 69,
    "recall": 73,
    "hung": 95,
    "waited": 95,
    "until": 112,
    "compare": 358,
    "spare": 250,
    "mates": 664,
    "alone": 475,
    "begin": 628,
    "stopped": 615,
    "awaited": 313,
    "left": 1221,
    "pardon": 4665,
}


@pytest.mark.parametrize("count", forms([20, 300], 20))
def test_simulated_members(count: int) -> None:
    assert not failing_seed("", 0, count)


def test_each_rule_is_shown_to_be_needed() -> None:
    assert SHOWN.keys() == RULES.keys()


@pytest.mark.parametrize(("rule", "first"), SHOWN.items())
def test_a_rule_that_is_left_out_is_missed(rule: str, first: int) -> None:
    assert any(shows(rule, seed) for seed in range(first, max(ENOUGH, first + MORE)))
