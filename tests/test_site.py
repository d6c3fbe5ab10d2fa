"""The documents as a site, and the pages that are held to sources of their own.

`make docs` builds it; docs/compare.md names a source for whatever it says of other libraries.
"""

from __future__ import annotations

import inspect
import re
from types import ModuleType
from typing import Any

import pytest
from conftest import Run
from documents import PAGES

import ringcomm
from lab import ROOT
from ringcomm import algorithms, elastic
from ringcomm.compression import hooks
from ringcomm.tools import plan

NOTHING = "\N{EN DASH}"  # in a table: no source was found
HEADING = re.compile(r"[\w .]+ \d\.\d+|Gloo")


def test_what_is_said_of_other_libraries_has_a_source() -> None:
    """Each cell about one has a link that is defined, with the day it was read."""
    page = (ROOT / "docs" / "compare.md").read_text()
    (day,) = re.findall(r"read on (\d{4}-\d\d-\d\d)", page)
    defined = dict(re.findall(r'^\[([\w-]+)\]: https://\S+ "read (\S+)"$', page, re.M))
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", page, re.M)]
    said = [cell for row in rows for cell in row[2:] if not HEADING.fullmatch(cell)]
    claims = [cell for cell in said if cell != NOTHING]
    assert len(claims) > 60
    used = {name for cell in claims for name in re.findall(r"\]\[([\w-]+)\]", cell)}
    # Our own measurement of Gloo is a source, too.
    sources = r"\]\[[\w-]+\]|\(networks\.md#the-fault-table\)"
    assert not [cell for cell in claims if not re.search(sources, cell)]
    assert used == set(defined)
    assert set(defined.values()) == {day}


PUBLIC = [ringcomm, algorithms, hooks, elastic, plan]


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
    found = [] if value.__doc__ else [name]
    for key, member in vars(value).items() if inspect.isclass(value) else ():
        if not key.startswith("_") and (callable(member) or isinstance(member, property)):
            found += [f"{name}.{key}"] * (not member.__doc__)
    return found


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
