"""setup.py finds the torch of the environment that it builds for, and says what is missing."""

from __future__ import annotations

import re
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import setuptools

from lab import ROOT
from lab.scripts import load

SETUP = ROOT / "setup.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load setup.py without building anything."""
    monkeypatch.setattr(setuptools, "setup", lambda **words: None)
    return partial(load, SETUP)


def test_pages_elsewhere_need_whole_addresses(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script().readme() == (ROOT / "README.md").read_text()
    assert script().urls() == {}
    monkeypatch.setenv("RINGCOMM_URL", "https://example.org/ringcomm/")
    module = script()
    page, at = module.readme(), f"v{module.version()}"
    assert not re.findall(r"\]\((?!https?:|#)[^)]*\)", page)
    assert f"(https://example.org/ringcomm/raw/{at}/docs/pictures/hang.svg)" in page
    assert f"[Installation](https://example.org/ringcomm/blob/{at}/docs/install.md)" in page
    assert module.urls()["Source"] == "https://example.org/ringcomm"


def test_the_activated_environment_is_looked_at(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both pip and uv build in an environment of their own, which uv says is the activated one."""
    mine, conda, uvs = tmp_path / "mine", tmp_path / "conda", tmp_path / "uvs"
    for folder in (mine, uvs, tmp_path / "no_environment"):
        (folder / "bin").mkdir(parents=True)
    for folder in (mine, uvs):
        (folder / "pyvenv.cfg").touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(uvs))
    monkeypatch.setenv("CONDA_PREFIX", str(conda))
    monkeypatch.setenv("PATH", f"{uvs}/bin:{mine}/bin:{tmp_path}/no_environment/bin:/usr/bin")

    def site(prefix: Path) -> Path:
        at = {"platbase": str(prefix), "base": str(prefix)}
        return Path(sysconfig.get_path("platlib", vars=at))

    _, *others = script().sites()
    assert list(dict.fromkeys(others)) == [site(uvs), site(conda), site(mine)]


def test_no_torch(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script()
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "sites", lambda: iter(()))
    with pytest.raises(SystemExit, match=r"found none: `pip install torch==\S+`, then the same"):
        module.torch_folder()


def test_the_extra_for_cuda_is_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", told.update)
    module = load(SETUP)
    assert told["extras_require"]["cuda"] == [f"ringcomm-cuda=={module.version()}"]


def test_an_old_setuptools(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setuptools, "__version__", "66.1.1")
    with pytest.raises(SystemExit, match=r"setuptools 77 or newer .*`pip install --upgrade"):
        script()
