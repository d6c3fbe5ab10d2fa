"""The demo trains over ringcomm, and ends with the same bits as over Gloo."""

import re
from pathlib import Path

import pytest
import torch
from conftest import Run

from lab import ROOT

DEMO = ROOT / "examples" / "train_digits.py"


@pytest.mark.slow  # `make demo` runs it as well
def test_it_learns_and_ends_with_the_bits_of_gloo(torchrun: Run, tmp_path: Path) -> None:
    saved = {}
    for backend in ("ringcomm", "gloo"):
        file = tmp_path / f"{backend}.pt"
        result = torchrun(2, DEMO, "--backend", backend, "--parameters", file)
        assert result.returncode == 0, result.stderr
        last = result.stdout.splitlines()[-1]
        form = rf"accuracy=(\d\.\d\d) backend={backend} ranks=2 seconds=\d+\.\d"
        found = re.fullmatch(form, last)
        assert found, last
        assert float(found[1]) >= 0.95
        saved[backend] = torch.load(file)
    assert saved["ringcomm"].keys() == saved["gloo"].keys()
    for name, ours in saved["ringcomm"].items():
        bits = (ours.view(torch.int32), saved["gloo"][name].view(torch.int32))
        assert torch.equal(*bits), f"{name} differs in {(bits[0] != bits[1]).sum()} elements"


@pytest.mark.slow
def test_too_little_training_is_a_failure(torchrun: Run) -> None:
    result = torchrun(2, DEMO, "--epochs", "0")
    assert result.returncode == 1
    assert re.match(r"accuracy=0\.[0-4]\d backend=ringcomm ranks=2", result.stdout.splitlines()[-1])


def test_a_second_build_does_nothing(run: Run) -> None:
    if not (ROOT / "build" / "built").exists():
        pytest.skip("the library was not built by scripts/build.sh")
    result = run("scripts/env.sh", "user", "scripts/build.sh")
    assert result.returncode == 0, result.stderr
    assert "building" not in result.stderr
