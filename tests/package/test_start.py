"""The command line: what it says of itself, and that it starts at once, without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import ringcomm
from lab.limits import limit
from ringcomm.__main__ import COMMANDS as TOP
from ringcomm.__main__ import main


def named(commands: Mapping[str, Any], *group: str) -> Iterator[list[str]]:
    """Yield the words that name each command, also those of a group itself."""
    for name, (module, _) in commands.items():
        yield [*group, name]
        if isinstance(module, dict):
            yield from named(module, *group, name)


EVERY = [*named(TOP)]
STARTS = [
    *([*words, "--help"] for words in [[], *EVERY]),
    ["elastic", "store", "--help"],
    ["elastic", "rehearse", "--help"],
    ["--version"],
    ["plan", "show", "all_reduce", "--ranks", "4"],
    ["plan", "simulate", "all_reduce", "--ranks", "4"],
]


@pytest.mark.parametrize("words", STARTS, ids=" ".join)
def test_a_command_does_without_torch(words: list[str]) -> None:
    program = (
        "import sys\nfrom ringcomm.__main__ import main\n"
        f"try:\n    main({words})\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        stdout=subprocess.PIPE,
        timeout=limit(60),
        env=os.environ | {"ZYGOTE_OFF": "1"},  # which has torch from the beginning
    )


def test_a_program_finds_the_backend_whichever_it_imports_first() -> None:
    for imports in ("ringcomm, torch", "torch, ringcomm", "ringcomm, torch.distributed"):
        program = f"import {imports}\nimport torch.distributed as dist\ndist.Backend.RINGCOMM\n"
        subprocess.run([sys.executable, "-c", program], check=True, timeout=limit(60))


def test_it_registers_itself_where_torch_discovers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    program = "import ringcomm\nimport torch.distributed as dist\ndist.Backend.RINGCOMM\n"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=limit(60))


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code
    return capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(["--version"], capsys)
    assert text.startswith(f"ringcomm {ringcomm.__version__}, built for torch 2.")


@pytest.mark.parametrize("words", [[], ["help"], ["--help"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = said(words, capsys)
    places = [re.search(rf"^    {name}\b", text, re.M) for name in TOP]
    assert all(places)
    begins = [place.start() for place in places if place]
    assert begins == sorted(begins)
    assert "examples:\n  ringcomm bench all_reduce" in text


@pytest.mark.parametrize(
    "words",
    [words for words in EVERY if not isinstance(TOP[words[0]][0], dict) or words[1:]],
    ids=" ".join,
)
def test_each_help_has_examples_that_are_right(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first paragraph is for users: it names no file of the source."""
    text = said(["help", *words], capsys)
    _, _, examples = text.partition("\nexamples:\n")
    lines = [line for line in examples.splitlines() if "ringcomm" in line]
    assert lines
    if words[0] != "completion":
        assert any(f"ringcomm {' '.join(words)}" in line for line in lines)
    description = text.partition("\n\n")[2].partition("\n\n")[0]
    assert description
    assert ".py" not in description


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "simulate" in script
    assert "--perfetto" in script
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True, timeout=limit(60))
