"""An activated environment that lacks something: scripts/env.sh ends, and nothing runs in it."""

import sys
from pathlib import Path

import pytest
from conftest import Run

# A Python that has torch, and `lacks` a package, which it cannot install.
PYTHON = """#!/bin/sh
case "$*" in
  *'version("torch")'*) echo 2.11.0 ;;
  scripts/lacking.py*) {lacks} ;;
  *'pip install'*) echo there is no such package >&2; exit 1 ;;
  *) exec '{python}' "$@" ;;
esac
"""


@pytest.mark.parametrize(
    ("lacks", "compiler", "said"),
    [
        (":", "no-such-compiler", "missing a C++ compiler"),
        ("echo numpy", None, "there is no such package"),
        ("exit 1", None, ""),
    ],
)
def test_what_an_activated_environment_lacks_ends_it(
    run: Run, tmp_path: Path, lacks: str, compiler: str | None, said: str
) -> None:
    interpreter = tmp_path / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.write_text(PYTHON.format(lacks=lacks, python=sys.executable))
    interpreter.chmod(0o755)
    result = run(
        *("scripts/env.sh", "user", "echo", "it runs"),
        VIRTUAL_ENV=str(tmp_path),
        TORCH=None,
        CXX=compiler,
    )
    assert result.returncode == 1, result.stdout
    assert "it runs" not in result.stdout
    assert said in result.stderr
