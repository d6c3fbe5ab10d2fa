"""Commands that somebody runs in a hurry start without torch, which takes seconds to import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lab.limits import limit

COMMANDS = [
    ["--help"],
    ["trace", "--help"],
    ["top", "--help"],
    ["plan", "show", "all_reduce", "--ranks", "4"],
    ["plan", "simulate", "all_reduce", "--ranks", "4"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
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
