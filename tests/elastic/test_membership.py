"""The rules of membership, in virtual time: see lab/membership.py."""

from __future__ import annotations

import pytest
from conftest import forms

from lab.membership import failing_seed, simulate
from lab.membership_rules import RULES

# Rules, and the first seed that shows that they are missing.
SHOWN = {
    "whole": 0,
    "gone": 0,
    "over": 1,
    "succeed": 1,
    "alone": 19,
    "awaited": 25,
    "lapse": 29,
    "compare": 41,
    "mates": 41,
    "forgive": 54,
    "bars": 137,
    "recombine": 156,
    "begin": 234,
}


@pytest.mark.parametrize("count", forms([20, 300], 20))
def test_simulated_members(count: int) -> None:
    assert not failing_seed("", 0, count)


def test_each_rule_is_shown_to_be_needed() -> None:
    assert SHOWN.keys() == RULES.keys()


@pytest.mark.parametrize(("rule", "seed"), SHOWN.items())
def test_a_rule_that_is_left_out_is_missed(rule: str, seed: int) -> None:
    with pytest.raises(AssertionError, match=rf"seed {seed}: .*--tell {seed} {rule}"):
        simulate(seed, rule)
