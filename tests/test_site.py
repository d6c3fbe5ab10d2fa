"""The documents as a site, which `make docs` builds, and the page of the public names."""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import pytest
from conftest import Run

import ringcomm
from lab import ROOT
from lab.documents import PAGES
from ringcomm import algorithms, elastic
from ringcomm.compression import hooks
from ringcomm.tools.plan import notebook

PUBLIC = [ringcomm, algorithms, hooks, elastic, notebook]


def public_names(module: ModuleType) -> list[str]:
    return [f"{module.__name__}.{name}" for name in module.__all__]


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^::: ([\w.]+)$", page, re.M)
    public = [name for module in PUBLIC for name in public_names(module)]
    assert sorted(shown) == sorted(
        [*public, "ringcomm._C.Backend", "ringcomm.compression.quantized_all_reduce"]
    )


def undocumented(name: str, value: Any) -> list[str]:
    """The value and its public members that have no docstring of their own."""
    bare = [] if value.__doc__ else [name]
    for key, member in vars(value).items() if inspect.isclass(value) else ():
        if not key.startswith("_") and (callable(member) or isinstance(member, property)):
            bare += [f"{name}.{key}"] * (not member.__doc__)
    return bare


def test_every_public_name_has_a_docstring() -> None:
    """Those of Options come from its table: see `write_options.py --check`."""
    values = {name: getattr(ringcomm, name) for name in ringcomm.__all__}
    del values["Options"], values["__version__"]
    for module in PUBLIC[1:]:
        values |= {name: getattr(module, name) for name in module.__all__}
    del values["Algorithm"]  # a type alias
    assert len(values) == sum(len(module.__all__) for module in PUBLIC) - 3
    assert not [missing for name, value in values.items() for missing in undocumented(name, value)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_site_is_built(run: Run) -> None:
    """By MkDocs, to which a link or an anchor that leads nowhere is an error."""
    result = run(ROOT / "scripts" / "docs.sh", seconds=300)
    assert result.returncode == 0, result.stderr
    pages = sorted((ROOT / "build" / "docs" / "site").glob("*.html"))
    assert len(pages) > len(PAGES)
    loaded = re.compile(r'<(?:script|link|img)[^>]* (?:src|href)="https?://')
    assert not [page.name for page in pages if loaded.search(page.read_text())]
    api = (ROOT / "build" / "docs" / "site" / "api.html").read_text()
    names = [*public_names(ringcomm), *public_names(elastic), "ringcomm.Options.spin_us"]
    assert not [name for name in names if f'id="{name}"' not in api]
