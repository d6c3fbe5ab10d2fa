"""Former names of the package: each works for one more version, and says where it has gone."""

from __future__ import annotations

import importlib

import pytest

import ringcomm

NAMES = ringcomm._MOVED
MODULES = {
    "ringcomm.hooks": ("ringcomm.compression.hooks", "register"),
    "ringcomm.plan": ("ringcomm.algorithms", "send"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_found_where_it_was(name: str) -> None:
    with pytest.warns(FutureWarning, match=f"ringcomm.{name} is now {NAMES[name]}$"):
        former = getattr(ringcomm, name)
    module, _, now = NAMES[name].rpartition(".")
    assert former is getattr(importlib.import_module(module), now)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_is_found_where_it_was(module: str) -> None:
    place, name = MODULES[module]
    with pytest.warns(FutureWarning, match=f"{module} is now {place}$"):
        former = importlib.reload(importlib.import_module(module))
    assert getattr(former, name) is getattr(importlib.import_module(place), name)


def test_no_other_name_is_made_up() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        ringcomm.nonsense  # noqa: B018
