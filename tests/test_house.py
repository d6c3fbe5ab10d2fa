"""The rules that keep the house a house: see CONTRIBUTING.md."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import ROOT

# A folder may include its own headers and those of folders below it.
BELOW = {
    "base": set(),
    "net": {"base"},
    "plan": {"base"},
    "reduce": {"base"},
    "transport": {"base", "net"},
    "exec": {"base", "net", "plan", "reduce", "transport"},
    "device": {"base", "net", "plan", "reduce", "transport"},
    "cuda": {"base", "reduce", "device"},  # a library of its own
    "elastic": {"base", "net", "transport"},
    "stream": {"base", "net", "plan", "reduce", "transport", "exec", "device", "comm"},
    "comm": {"base", "net", "plan", "reduce", "transport", "exec", "device", "stream"},
    "verify": {"base", "plan"},  # beside the engine: a module of its own
    "torch": {"base", "net", "plan", "reduce", "transport", "exec", "device", "elastic"}
    | {"comm", "stream"},
}
# What only torch's side may include; torch/headeronly is free everywhere.
TORCH = re.compile(r"(torch(?!/headeronly/)|c10|c10d|ATen|aten|caffe2|pybind11)/|Python\.h$")
MACRO = re.compile(r"#\s*define\s+(\w+)")
MACROS = {
    "RINGCOMM_CHECK": "csrc/base/error.h",
    "RINGCOMM_GUARDED_BY": "csrc/base/mutex.h",
    "RINGCOMM_ISA": "csrc/reduce/",
    "RINGCOMM_REQUIRES": "csrc/base/mutex.h",
    "RINGCOMM_THREAD_SAFETY": "csrc/base/mutex.h",
    "RINGCOMM_UNCHECKED_LOCKS": "csrc/base/mutex.h",
}

LINES = 480  # a file holds one idea: this only finds those that hold several
LONGER = {  # why it may be
    "ringcomm/_C.pyi": "each option is an attribute with its text",
}
COLUMNS = 100
CPP_TOTAL = 21_950  # lines with code on them, those for devices included
VERIFIER_TOTAL = 1_300  # beside the engine: it proves plans, and runs none

# Joined here, so that this file does not name them.
ELSEWHERE = re.compile("|".join(["/wo" + "rk/", r"\.\./sha" + "red", "pypi" + r"\.org"]))


def files(*folders: str, ends: tuple[str, ...]) -> list[Path]:
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in ends]
    return sorted(p for p in found if "__pycache__" not in p.parts)


CPP = files("csrc", "tests", "benchmarks", ends=(".h", ".cc", ".cu", ".cuh"))
CSRC = [path for path in CPP if path.is_relative_to(ROOT / "csrc")]
PYTHON = files("ringcomm", "lab", "tests", "benchmarks", "examples", ends=(".py", ".pyi"))


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(path: Path) -> str:
    """The source without its comments and string literals; line breaks stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''

    def blank(found: re.Match[str]) -> str:
        text = found.group()
        return '""' if text[0] == '"' else "\n" * text.count("\n")

    return re.sub(pattern, blank, path.read_text(), flags=re.DOTALL)


def includes(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        found = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if found:
            yield found.group(1)


def test_there_is_something_to_check() -> None:
    assert len(CSRC) > 20
    assert {path.parent.name for path in CSRC} <= set(BELOW)


@pytest.mark.parametrize("folder", BELOW)
def test_includes_only_go_down(folder: str) -> None:
    allowed = BELOW[folder] | {folder}
    wrong = [
        f"{short(path)} includes {header}"
        for path in CSRC
        if path.parent.name == folder
        for header in includes(path)
        if (ROOT / "csrc" / header).exists() and header.split("/")[0] not in allowed
    ]
    assert not wrong


def test_torch_stays_in_its_folder() -> None:
    wrong = [
        f"{short(path)} includes {header}"
        for path in CPP
        if path.parent != ROOT / "csrc" / "torch"
        and path != ROOT / "csrc" / "verify" / "module.cc"  # a Python module, without torch
        and not (path.parent == ROOT / "tests" / "sim" and path.name.startswith("torch_"))
        for header in includes(path)
        if TORCH.match(header) and not (ROOT / "csrc" / header).exists()
    ]
    assert not wrong


def test_our_headers_are_named_from_the_floor() -> None:
    """`#include "plan/plan.h"`, never "plan.h" or "../plan/plan.h", so the rules above can see."""
    wrong = [
        f"{short(path)} includes {header}"
        for path in CSRC
        for header in includes(path)
        if header.startswith(".") or (path.parent / header).exists()
    ]
    assert not wrong


def test_the_environment_is_read_by_python_alone() -> None:
    readers = [short(p) for p in CSRC if re.search(r"\b(secure_)?getenv\b|\benviron\b", code(p))]
    assert readers == []


def test_no_size_of_a_cache_is_believed() -> None:
    """Virtual machines tell sizes that are not theirs: what pays is measured (exec/tuner.h)."""
    told = r"devices/system/cpu/cpu|_SC_LEVEL\d|_CACHE_(LINE)?SIZE|__cpuid"
    assert [short(path) for path in CSRC if re.search(told, path.read_text())] == []


def test_words_that_are_not_used() -> None:
    wrong = [
        f"{short(path)}: {word}"
        for path in CPP
        for word in re.findall(r"\bgoto\b|(?<!asm )\bvolatile\b", code(path))
    ]
    assert not wrong


def words_of(text: str) -> Iterator[str]:
    """The words of a text, those of names too: of `KernelLaunch` and `kernel_launch` the same."""
    return (word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text))


def test_retired_words() -> None:
    head, _, rest = (ROOT / "docs" / "style.md").read_text().partition("## Retired words\n")
    table, _, tail = rest.partition("\n## ")
    retired = {row.split("|")[1].strip() for row in re.findall(r"^\| .*", table, re.MULTILINE)[1:]}
    assert len(retired) > 10
    retired |= {f"{word}s" for word in retired} | {f"{word}d" for word in retired}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    texts = {path: path.read_text() for path in [*CPP, *PYTHON, *pages]}
    texts[ROOT / "docs" / "style.md"] = head + tail
    wrong = [
        f"{short(path)}: {word}" for path, text in texts.items() for word in words_of(text)
        if word in retired
    ]  # fmt: skip
    assert not wrong


def test_macros() -> None:
    wrong = [
        f"{short(path)} defines {name}"
        for path in CSRC
        for name in MACRO.findall(code(path))
        if not short(path).startswith(MACROS.get(name, "nowhere"))
    ]
    assert not wrong


def test_lengths() -> None:
    lines = {short(path): len(path.read_text().splitlines()) for path in CPP + PYTHON}
    assert {name: n for name, n in lines.items() if n > LINES and name not in LONGER} == {}
    stale = {name for name in LONGER if lines.get(name, 0) <= LINES}
    assert not stale, "no longer long: take it off the list"


def test_columns() -> None:
    wrong = [
        f"{short(path)}:{number}"
        for path in CPP
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > COLUMNS
    ]
    assert not wrong


def lines_of_code(paths: list[Path]) -> int:
    lines = [line.strip() for path in paths for line in path.read_text().splitlines()]
    return len([line for line in lines if line and not line.startswith("//")])


def test_the_engine_stays_small() -> None:
    beside = [path for path in CSRC if path.parent.name == "verify"]
    assert lines_of_code([path for path in CSRC if path not in beside]) < CPP_TOTAL
    assert lines_of_code(beside) < VERIFIER_TOTAL


def test_cmake_names_every_source() -> None:
    """Explicit lists, so that a forgotten file is found here and not at link time, or never."""
    listed = re.sub(r"#.*", "", (ROOT / "CMakeLists.txt").read_text()).split()
    words = {word.strip("()") for word in listed}
    words |= {Path(word).stem for word in words}
    programs = files("tests/cpp", "benchmarks/cpp", ends=(".cc",))
    forgotten = [short(p) for p in CSRC if p.suffix == ".cc" and p.name not in words]
    forgotten += [short(p) for p in programs if p.stem not in words]
    assert not forgotten


def test_nothing_points_outside() -> None:
    ends = (".h", ".cc", ".cu", ".py", ".pyi", ".md", ".sh", ".in", ".toml", ".txt", ".rst")
    inside = ["csrc", "ringcomm", "lab", "tests", "benchmarks", "examples", "docs", "scripts"]
    paths = files(*inside, ends=ends)
    paths += [p for p in ROOT.iterdir() if p.is_file()] + [ROOT / ".ci" / "run"]
    wrong = [
        f"{short(path)}: {found.group()}"
        for path in paths
        if path.name != "_build_info.py"
        for found in [ELSEWHERE.search(path.read_text())]
        if found
    ]
    assert not wrong


def test_the_path_of_imports_stays() -> None:
    """What files share lies in lab/, which every one of them finds: see lab/__init__.py."""
    changes = re.compile(r"sys\.path\.(insert|append|extend)")
    inside = files("ringcomm", "lab", "tests", "benchmarks", ends=(".py",))
    assert [short(path) for path in inside if changes.search(path.read_text())] == []


def test_the_picture_of_the_floors_is_true() -> None:
    script = ROOT / "docs" / "draw_floors.py"
    assert subprocess.run([sys.executable, script, "--check"]).returncode == 0, (
        "draw it again: `python docs/draw_floors.py`"
    )


def literals(paths: list[Path]) -> str:
    """All string literals; adjacent ones are one, as the compiler has it."""
    literal = r'"((?:\\.|[^"\\\n])*)"'
    text = "\n".join(path.read_text() for path in paths)
    runs = re.finditer(rf"(?:{literal}\s*)+", text)
    return "\n".join("".join(re.findall(literal, run.group())) for run in runs)


def python_literals(paths: list[Path]) -> str:
    """The texts of Python sources; those of f-strings between their placeholders."""
    trees = [ast.parse(path.read_text()) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return "\n".join(
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_documented_failures_are_in_the_source() -> None:
    """Each text of docs/failures.md, between its placeholders, is one that can be raised."""
    page = (ROOT / "docs" / "failures.md").read_text()
    known = literals(CSRC) + python_literals(files("ringcomm", ends=(".py",)))
    rows = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| `")]
    parts = [
        part.strip()
        for row in rows
        for text in re.findall(r"`([^`]+)`", row)
        for part in text.split("…")
    ]
    assert len(rows) > 20
    assert not [part for part in parts if len(part) > 2 and part not in known]
