"""The end of a program that has not destroyed its groups: its own handlers at exit, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Run

HANDLER = """
import atexit, os, sys
def last():
    import torch, torch.distributed as dist
    data = torch.ones(3)
    dist.all_reduce(data)
    sys.stdout.write(f"rank {os.environ['RANK']} has {data.tolist()}\\n")
    sys.stdout.flush()
"""
JOIN = """
import torch, torch.distributed as dist
dist.init_process_group("ringcomm")
dist.all_reduce(torch.ones(3))
"""
REGISTER = "atexit.register(last)\n"
PLACES = {
    "before torch": HANDLER + REGISTER + JOIN,
    "before the group": HANDLER + "import torch\n" + REGISTER + JOIN,
    "after the group": HANDLER + JOIN + REGISTER,
}


@pytest.fixture
def end(torchrun: Run, tmp_path: Path) -> Any:
    def run(program: str, ranks: int = 2, **environment: str) -> Any:
        script = tmp_path / "program.py"
        script.write_text(program)
        return torchrun(ranks, script, **environment)

    return run


@pytest.mark.parametrize("place", PLACES)
def test_handlers_at_exit_have_the_groups(end: Any, place: str) -> None:
    done = end(PLACES[place], ZYGOTE_WHOLE="1")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} has [2.0, 2.0, 2.0]" in done.stdout, done.stderr


@pytest.mark.parametrize("place", PLACES)
def test_also_after_sys_exit(end: Any, place: str) -> None:
    done = end(f"{PLACES[place]}sys.exit(0)\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has [2.0, 2.0, 2.0]") == 2, done.stderr


def test_a_handler_may_destroy_the_groups(end: Any) -> None:
    program = PLACES["before torch"].replace(
        "    sys.stdout.write(", "    dist.destroy_process_group()\n    sys.stdout.write(", 1
    )
    done = end(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has [2.0, 2.0, 2.0]") == 2, done.stderr
    assert "ringcomm" not in done.stderr


def test_a_handler_that_raises_holds_nothing_up(end: Any) -> None:
    """Neither the handlers after it, nor the end of the groups, by which pending work is done."""
    program = (
        HANDLER
        + REGISTER
        + JOIN
        + "atexit.register(lambda: [][0])\nwork = dist.all_reduce(torch.ones(9), async_op=True)\n"
    )
    done = end(program)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("IndexError") == 2, done.stderr
    assert done.stdout.count("has [2.0, 2.0, 2.0]") == 2, done.stderr


def test_a_program_that_raises_tells_the_others_before_its_handlers_end(end: Any) -> None:
    """Its handler waits until rank 1 has been told: else it would wait for the whole timeout."""
    program = """
import atexit, os, sys, time
from pathlib import Path
rank, told = int(os.environ["RANK"]), Path("told")
def last():
    while rank == 0 and not told.exists(): time.sleep(0.01)
atexit.register(last)
import torch, torch.distributed as dist
dist.init_process_group("ringcomm")
if rank == 0: raise RuntimeError("a bad batch")
try:
    dist.all_reduce(torch.ones(3))
except dist.DistBackendError as error:
    told.write_text(str(error))
"""
    done = end(program)
    assert done.returncode != 0
    assert "its program ended with RuntimeError: a bad batch" in (
        Path(done.args[-1]).with_name("told").read_text()
    )


def test_an_ordinary_error_says_nothing_of_records(python: Run, tmp_path: Path) -> None:
    """The records are there for others, but nobody is sent to them: no group has failed."""
    program = """
import torch, torch.distributed as dist
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
"""
    for error in ("AssertionError('no')", "KeyboardInterrupt"):
        done = python(f"{program}raise {error}\n", TMPDIR=str(tmp_path), RINGCOMM_TRACE=None)
        assert error.partition("(")[0] in done.stderr
        assert "ringcomm" not in done.stderr.partition("Traceback")[0]
        assert "flight records" not in done.stderr, done.stderr
