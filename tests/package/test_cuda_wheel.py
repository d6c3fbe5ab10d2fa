"""ringcomm-cuda: a wheel with the library for CUDA tensors alone, which belongs to one ringcomm."""

from __future__ import annotations

import email
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ringcomm
from lab import ROOT
from lab.scripts import load


def script(name: str) -> Any:
    return load(ROOT / "scripts" / f"{name}.py")


def packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheels = script("wheels")
    monkeypatch.setattr(wheels, "WORK", folder)
    library = folder / "built.so"
    library.write_bytes(b"the library")
    path: Path = wheels.pack_cuda("x86_64", library)
    return path


def test_it_holds_the_library_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = packed(tmp_path, monkeypatch)
    version = ringcomm.__version__
    assert wheel.name == f"ringcomm_cuda-{version}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read("ringcomm/libringcomm_cuda.so") == b"the library"
        info = f"ringcomm_cuda-{version}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        record = archive.read(f"{info}/RECORD").decode()
    assert [name for name in names if not name.startswith(info)] == ["ringcomm/libringcomm_cuda.so"]
    assert [line.partition(",")[0] for line in record.splitlines()] == names[:-1]
    assert metadata["Version"] == version
    assert metadata.get_all("Requires-Dist") == [f"ringcomm=={version}"]
    assert metadata.get_all("Project-URL") is None
    assert "580 or newer" in str(metadata.get_payload())


def test_it_names_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_URL", "https://example.org/ringcomm/")
    with zipfile.ZipFile(packed(tmp_path, monkeypatch)) as archive:
        (path,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(archive.read(path))
    assert metadata["Project-URL"] == "Source, https://example.org/ringcomm"


def test_nvcc_builds_for_this_processor(capsys: pytest.CaptureFixture[str]) -> None:
    wheels = script("wheels")
    other = "aarch64" if wheels.platform.machine() == "x86_64" else "x86_64"
    with pytest.raises(SystemExit):
        wheels.main(["--cuda", "--arch", other])
    assert "for this machine's processor alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nvcc", "asked", "made"),
    [("nvcc", "", True), ("nvcc", "off", False), ("", "", False), ("", "off", False)],
)
def test_a_release_has_it_where_nvcc_is(
    nvcc: str, asked: str, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = script("release")
    monkeypatch.setattr(release, "NVCC", nvcc)
    monkeypatch.delenv("CUDA", raising=False)
    if asked:
        monkeypatch.setenv("CUDA", asked)
    assert release.wants_cuda() is made


def test_a_release_misses_nvcc_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    release = script("release")
    monkeypatch.setattr(release, "NVCC", None)
    monkeypatch.setenv("CUDA", "on")
    with pytest.raises(SystemExit, match="CUDA=on needs the nvcc of CUDA 13 on PATH"):
        release.wants_cuda()


def test_the_components_of_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = script("release")
    monkeypatch.setattr(release, "DIST", tmp_path)
    monkeypatch.setattr(release, "NVCC", "nvcc")
    said = {"nvcc": "Cuda compilation tools, release 13.0, V13.0.88", "openssl": "OpenSSL 3.0.19 x"}
    monkeypatch.setattr(release, "told", lambda program, *words: said[program])
    for with_cuda, names in ((False, ["openssl"]), (True, ["openssl", "cuda-runtime"])):
        release.write_sbom("1.2.3", with_cuda)
        text = (tmp_path / "ringcomm-1.2.3.cdx.json").read_text()
        parts = release.json.loads(text)["components"]
        assert [part["name"] for part in parts] == names
    assert parts[-1]["version"] == "13.0"
