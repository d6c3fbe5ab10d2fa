"""The documents as a site, which `make docs` builds, and the page of the public names."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
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

ROLES = ("AUTHOR", "COMMITTER")
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_versions_are_published_beside_one_another(run: Run, tmp_path: Path) -> None:
    """The newest is the one that the root leads to, also after an older one is mended."""
    someone = {f"GIT_{role}_{what}": "a@b.c" for role in ROLES for what in ("NAME", "EMAIL")}
    # It makes the environment, which the clone uses, too.
    assert run(ROOT / "scripts" / "docs.sh", seconds=300).returncode == 0
    assert run("git", "clone", "-q", ROOT, tmp_path / "clone").returncode == 0
    clone = tmp_path / "clone"
    (clone / ".venv-docs").symlink_to(ROOT / ".venv-docs")
    site = "https://example.org/pages/"
    for version in ("1.9", "1.10", "1.9"):
        result = run(
            *(clone / "scripts" / "docs.sh", "publish", version),
            **({"cwd": clone, "seconds": 300, "RINGCOMM_SITE": site} | someone),
        )
        assert result.returncode == 0, result.stderr

    def published(name: str) -> str:
        return run("git", "show", f"gh-pages:{name}", cwd=clone).stdout

    versions = {row["version"]: row["aliases"] for row in json.loads(published("versions.json"))}
    assert versions == {"1.9": [], "1.10": ["latest"]}
    assert "latest/" in published("index.html")
    assert f"<loc>{site}1.10/api.html</loc>" in published("sitemap.xml")
    assert 'href="/pages/1.10/site.css"' in published("404.html")
    assert '"provider": "mike"' in published("1.9/index.html")
