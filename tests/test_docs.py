"""Every block of code in README.md and docs/ runs, or is checked; links lead somewhere.

An HTML comment before a block of README.md or docs/ says how, as `<!-- test: ranks 2 -->`:

ranks 2            Python; runs on two ranks. `, with CODE` runs CODE first
as in FILE         Python for another package; FILE makes the same calls, and a test runs FILE
run                a short shell command; it runs. With `run slow`, in `make test-all`
output             equals the output of the command before it
checked            shell; the scripts, targets and options exist
source FILE NAME   equals the part of FILE between `// docs: NAME` and `// docs: end`
in the source      a message; its words stand in the source
tree               a tree of folders; each exists, and each folder of csrc/ is in it
not run: REASON    nothing is tested, and pytest's last lines print the reason
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from test_house import CSRC, MACROS, literals

from lab import ROOT
from lab.documents import PAGES, Block, blocks_of, inline_code, links, slugs, without_code
from lab.limits import limit
from lab.ports import free_port
from lab.ranks import HOST, Rank, Ranks
from ringcomm.options import VARIABLES

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
ENVIRONMENT = re.compile(r"[A-Z_]+=")
PRELUDE = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
"""


def blocks(directive: str) -> list[Block]:
    """Those whose comment begins like this."""
    return [block for block in BLOCKS if block.directive.startswith(directive)]


def for_blocks(directive: str) -> Any:
    return pytest.mark.parametrize("block", blocks(directive), ids=str)


def test_every_block_says_how_it_is_tested() -> None:
    kinds = "ranks |as in |run$|run slow$|output$|checked$|source |in the source$|tree$|not run: "
    wrong = [str(b) for b in BLOCKS if b.language != "mermaid" and not re.match(kinds, b.directive)]
    assert not wrong
    assert len(BLOCKS) > 40
    indented = re.compile(r"\n\n(?: {4}|\t)(?![-*\d ])")
    assert not [page.name for page in PAGES if indented.search(without_code(page))], "unfenced code"


def test_blocks_that_do_not_run(record_property: Callable[[str, object], None]) -> None:
    for block in blocks("not run: "):
        record_property("not run", f"{block}: {block.directive.removeprefix('not run: ')}")


# ---- Python


def play(rank: Rank, text: str, port: int) -> None:
    os.environ.update(RANK=str(rank.index), WORLD_SIZE=str(rank.size))
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port))
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["dist"].get_backend() == "ringcomm"
    names["dist"].barrier()  # the store, which is rank 0's, goes with the group
    names["dist"].destroy_process_group()


@for_blocks("ranks 2")
def test_python_on_ranks(block: Block, two: Ranks) -> None:
    before = block.directive.removeprefix("ranks 2").removeprefix(", with ")
    two(play, f"{PRELUDE}\n{before}\n{block.text}", free_port())


def calls(source: str) -> dict[str, set[str]]:
    """Return the functions and methods that a source calls, with keywords; "**": its own class."""
    keywords: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            keywords.setdefault(name, set()).update(word.arg or "**" for word in node.keywords)
        elif isinstance(node, ast.ClassDef):
            keywords.setdefault(node.name, set()).add("**")
    return keywords


@for_blocks("as in ")
def test_python_of_a_script_that_is_tested_elsewhere(block: Block) -> None:
    """Names stand for calls of the script that test_clients.py runs."""
    script = calls((ROOT / block.directive.removeprefix("as in ")).read_text())
    for name, keywords in calls(block.text).items():
        assert name in script
        assert "**" in script[name] or keywords <= script[name], name


# ---- the shell


def test_commands_that_run(run: Run) -> None:
    """Each output block is what the command before it prints."""
    assert len(blocks("output")) > 3
    printed = ""
    for block in BLOCKS:
        if block.directive == "run":
            printed = output_of(block, run)
        elif block.directive == "output":
            assert block.text == printed, str(block)


@pytest.mark.slow
@for_blocks("run slow")
def test_commands_that_take_longer(block: Block, run: Run) -> None:
    assert output_of(block, run)


def output_of(block: Block, run: Run) -> str:
    folder = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = run("bash", "-euc", block.text, PATH=folder)
    assert result.returncode == 0, (str(block), result.stderr)
    return result.stdout


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a block, each as its words, without comments and environment."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[-1:] == ["&"]:  # it goes on beside what follows
            words.pop()
        ours = {word.partition("=")[0] for word in words if word.startswith("RINGCOMM_")}
        assert ours <= {*VARIABLES, *MACROS}, ours
        while words and ENVIRONMENT.match(words[0]):
            words.pop(0)
        if words:
            yield words


SOURCES = "\n".join(
    path.read_text()
    for folder in ("csrc", "ringcomm", "scripts", "lab", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".h", ".cc", ".py", ".sh"} and path.name != "test_docs.py"
)


def check_command(words: list[str]) -> None:
    """The program is there, and takes these options."""
    program, *rest = words
    if program == "make":
        check_make(rest)
    elif program in ("python", "torchrun") and "..." not in rest and "…" not in rest:
        check_python(rest) if program == "python" else check_torchrun(rest)
    elif program == "pytest":
        check_tests(rest)
    elif program == "ringcomm":
        check_python(["-m", "ringcomm", *rest])
    elif "/" in program and not program.startswith("$"):
        # A test program of C++ is named in CMake; anything else lies here.
        source = f"cpp/**/{program.removeprefix('build/tests/')}.cc"
        sources = [*(ROOT / "tests").glob(source), *(ROOT / "benchmarks").glob(source)]
        assert (ROOT / program).exists() or sources


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z][\w-]*):", makefile, re.M)
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            assert name in targets
        elif name == "ARGS" and targets:
            check_tests(shlex.split(value))


def check_tests(words: list[str]) -> None:
    """Files exist, and -k names something in them."""
    paths = [ROOT / word.partition("::")[0] for word in words if "/" in word]
    assert all(path.exists() for path in paths), paths
    folders = [path for path in paths if path.is_dir()] or [ROOT / "tests"] * (not paths)
    files = [path for path in paths if path.is_file()]
    files += [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    text = "\n".join(f"{path.name} {path.read_text()}" for path in files)
    if "-k" in words:
        for name in re.findall(r"\w+", words[words.index("-k") + 1]):
            assert name in ("or", "and", "not", "NAME") or name in text, name


def check_torchrun(words: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    if "-m" not in words and not any(word.endswith(".py") for word in words):
        return  # a part of a command
    given = get_args_parser().parse_args(words)
    module = ["-m"] if given.module else []
    check_python([*module, given.training_script, *given.training_script_args])


def check_python(words: list[str]) -> None:
    first, *rest = words
    if first == "-m" and rest[0] == "pytest":
        return check_tests(rest[1:])
    if first == "-m" and rest[0] == "ringcomm":
        from ringcomm.__main__ import parse

        parse(rest[1:])
        return None
    if first.startswith("-") or "/" not in first:
        return None  # -c, another package's module
    script = ROOT / first
    assert script.exists(), first
    # Options are given to argparse as they are written, there or in a module that it imports.
    modules = [*script.parent.glob("*.py"), *(ROOT / "lab").glob("*.py")]
    beside = "\n".join(path.read_text() for path in modules)
    for word in rest:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in beside, word
    return None


@pytest.mark.parametrize("block", [*blocks("checked"), *blocks("run slow")], ids=str)
def test_commands_that_are_checked(block: Block) -> None:
    lines = list(commands(block.text))
    assert lines
    for words in lines:
        check_command(words)


def test_commands_in_the_text() -> None:
    """The same of what stands in a line."""
    programs = ("make ", "python ", "torchrun ", "pytest ", "ringcomm tune")
    places = ("build/tests/", "scripts/", "RINGCOMM_")
    seen = 0
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for code in inline_code(page):
            if code.startswith(programs + places):
                seen += 1
                for words in commands(code):
                    check_command(words)
    assert seen > 20


def test_a_command_that_does_not_exist_is_noticed() -> None:
    wrong = [
        "make demos",
        "make test ARGS='-k nothing" + "_is_named_so'",
        "python benchmarks/groups.py --group 3",
        "python benchmarks/collective.py",
        "python -m pytest tests/test_nothing.py",
        "torchrun --nnodes=2 examples/rings.py",
        "build/tests/print_plan all_reduce",
        "RINGCOMM_FLOW=2 make demo",
    ]
    for line in wrong:
        try:
            check_command(next(commands(line)))
        except AssertionError:
            continue
        pytest.fail(line)


# ---- what is quoted


@for_blocks("source ")
def test_code_of_a_file(block: Block) -> None:
    _, path, name = block.directive.split()
    whole = (ROOT / path).read_text()
    region = re.search(rf"// docs: {name}\n(.*?)// docs: end\n", whole, re.S)
    assert region
    assert block.text == region[1]


@for_blocks("in the source")
def test_texts_that_can_be_raised(block: Block) -> None:
    """Every run of words of a text, between its numbers and names, stands in the source."""
    known = literals(CSRC) + SOURCES
    text = " ".join(block.text.split())
    parts = re.split(r"[…()\[\]#:,]|=/\S+|\blo(?= \d)|\b[\w./-]*\d[\w./-]*\b|\brank\b", text)
    words = [part.strip() for part in parts if len(part.split()) > 1]
    assert words
    assert not [part for part in words if part not in known]


def test_the_tree_names_every_folder() -> None:
    (tree,) = blocks("tree")
    parents: list[str] = []
    named = set()
    for line in tree.text.splitlines():
        match = re.match(r"( *)([\w.]+)/(?: +(\S.*))?$", line)
        assert match, line
        parents[len(match[1]) // 2 :] = [match[2]]
        named.add("/".join(parents))
        assert match[3] or match[2] == "csrc", f"{line}: no word on it"
    assert not [name for name in named if not (ROOT / name).is_dir()]
    floors = {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert floors <= named


def test_files_that_are_named_exist() -> None:
    ends = r"\.(?:h|cc|cu|py|sh|md|json|txt|yaml|toml)"
    wrong = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(rf"`([\w./-]+/[\w.-]+{ends})`", without_code(page)):
            places = [ROOT / base / name for base in (".", "csrc", "ringcomm")]
            if not any(place.exists() for place in places) and "NAME" not in name:
                wrong.append(f"{page.name}: {name}")
    assert not wrong


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("*/README.md")],
    ids=lambda p: p.name,
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in slugs(target), link


# ---- the picture of the memory


def mapped(rank: Rank, port: int) -> list[int]:
    """The sizes of the segments of a group of this rank's host."""
    import torch.distributed as dist

    address = f"tcp://{HOST}:{port}"
    dist.init_process_group("ringcomm", init_method=address, rank=rank.index, world_size=rank.size)
    lines = Path("/proc/self/maps").read_text().splitlines()
    sizes = [line.split()[0].split("-") for line in lines if "/memfd:ringcomm (" in line]
    dist.barrier()  # rank 0 serves the store, which the other may need until its group is made
    dist.destroy_process_group()
    return [int(end, 16) - int(begin, 16) for begin, end in sizes]


def test_the_picture_of_the_memory_is_true(two: Ranks) -> None:
    script = ROOT / "docs" / "draw_memory.py"
    command = [sys.executable, str(script), "--check"]
    assert subprocess.run(command, timeout=limit(20)).returncode == 0, (
        "draw it again: `python docs/draw_memory.py`"
    )
    picture = (ROOT / "docs" / "memory.svg").read_text()
    (whole,) = re.findall(r"one rank of two: ([\d,]+) bytes", picture)
    sizes = two(mapped, free_port())
    assert sizes == [[int(whole.replace(",", ""))] * 2] * 2
