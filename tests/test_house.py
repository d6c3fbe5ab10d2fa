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
PLANS = {"base", "net", "plan", "reduce", "transport", "exec"}  # to make a plan, and to run it
HOST = PLANS | {"report", "group", "host", "message", "progress"}  # a group on the host alone
BELOW = {
    "base": set(),
    "net": {"base"},
    "plan": {"base"},
    "reduce": {"base"},
    "transport": {"base", "net"},
    "exec": PLANS - {"exec"},
    "device": {"base", "net", "plan", "reduce", "transport"},
    "cuda": {"base", "reduce", "device"},  # a library of its own
    "elastic": {"base", "net", "transport"},
    "report": PLANS,
    "group": PLANS | {"report"},
    "host": PLANS | {"report", "group"},
    "message": PLANS | {"report", "group"},
    "progress": HOST,
    "stream": HOST | {"device"},
    "comm": HOST | {"device", "stream"},
    "verify": {"base", "plan"},  # beside the engine: a module of its own
    "torch": HOST | {"device", "stream", "comm", "elastic"},
}
# Only torch's side may include these; torch/headeronly is free everywhere.
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

FUNCTION_LINES = 60  # a function fits a screen; a file is as long as its idea takes
LONGER = {  # file and function, with the reason
    "csrc/cuda/meetings.inc.h low_latency_body": "a kernel, whose steps share everything",
    "csrc/cuda/ring.inc.h ring_body": "a kernel, whose steps share everything",
    "tests/cpp/net/peers_test.cc few_connections": "a story, told in order",
    "tests/cpp/net/wide_death.h stop_one": "a story, told in order",
}
PUBLIC_FUNCTIONS = 20  # a class's, beside overrides, which its base asks for
WIDER = {  # how many these have: never more
    "csrc/device/api.h Api": 37,
    "csrc/net/peer.h Network": 30,
    "csrc/net/session.h Session": 34,
    "csrc/plan/builder.h PlanBuilder": 26,
    "csrc/torch/backend.h Backend": 24,
    "csrc/transport/transport.h Transport": 52,
}
CPP_TOTAL = 24_000  # lines with code on them, those for devices included
PLANNER_TOTAL = 1_450  # beside the engine: it makes plans and proves them, and runs none

# Joined here, so that this file does not name them.
ELSEWHERE = re.compile("|".join(["/wo" + "rk/", r"\.\./sha" + "red", "pypi" + r"\.org"]))


def files(*folders: str, ends: tuple[str, ...]) -> list[Path]:
    paths = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in ends]
    return sorted(p for p in paths if "__pycache__" not in p.parts)


CPP = files("csrc", "tests", "benchmarks", ends=(".h", ".cc", ".cu", ".cuh"))
CSRC = [path for path in CPP if path.is_relative_to(ROOT / "csrc")]
PYTHON = files("ringcomm", "lab", "tests", "benchmarks", "examples", ends=(".py", ".pyi"))


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(path: Path) -> str:
    """The source without its comments and string literals; line breaks stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''

    def blank(match: re.Match[str]) -> str:
        text = match.group()
        return '""' if text[0] == '"' else "\n" * text.count("\n")

    return re.sub(pattern, blank, path.read_text(), flags=re.DOTALL)


def includes(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if match:
            yield match.group(1)


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
    """Virtual machines tell sizes that are not theirs, so exec/tuner.h measures what pays."""
    told = r"devices/system/cpu/cpu|_SC_LEVEL\d|_CACHE_(LINE)?SIZE|__cpuid"
    assert [short(path) for path in CSRC if re.search(told, path.read_text())] == []


def test_words_that_are_not_used() -> None:
    """ThreadSanitizer doesn't know fences: an access of the word itself can always say the same."""
    unwanted = r"\bgoto\b|(?<!asm )\bvolatile\b|\batomic_thread_fence\b"
    wrong = [f"{short(path)}: {word}" for path in CPP for word in re.findall(unwanted, code(path))]
    assert not wrong


def test_ranks_compare_good_hashes() -> None:
    """By mix(), because hashes that torch or Boost combine collide for small numbers."""
    weak = r"\bget_hash\b|\bhash_combine\b|c10/util/hash"
    assert [short(path) for path in CSRC if re.search(weak, path.read_text())] == []


def test_macros() -> None:
    wrong = [
        f"{short(path)} defines {name}"
        for path in CSRC
        for name in MACRO.findall(code(path))
        if not short(path).startswith(MACROS.get(name, "nowhere"))
    ]
    assert not wrong


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a C++ file with its lines, as clang-format lays them out.

    It begins with a line that ends in `{`, and ends with the next `}` in the same column.
    """
    lines = path.read_text().splitlines()
    begin = re.compile(r"( *)(?![ :}/#]|(?:if|for|while|switch|else|do|return|namespace)\b).*\{$")
    for number, line in enumerate(lines):
        start = begin.match(line)
        name = re.search(r"(~?\w+|operator\S+)\(", line)
        if not start or not name or re.search(r" = |\[.*\]\(|^ *(class|struct|enum) ", line):
            continue
        for end in range(number + 1, len(lines)):
            if lines[end] == start[1] + "}":
                yield name[1], end - number + 1
            if lines[end] and not lines[end].startswith((start[1] + " ", "#")):
                break


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def test_a_function_fits_a_screen() -> None:
    lines = {
        f"{short(path)} {name}": count
        for paths, read in ((CPP, functions), (PYTHON, python_functions))
        for path in paths
        for name, count in read(path)
    }
    assert len(lines) > 5000, "functions are not found where they are"
    long = {name: count for name, count in lines.items() if count > FUNCTION_LINES}
    assert {name: count for name, count in long.items() if name not in LONGER} == {}
    assert set(LONGER) <= set(long), "no longer long: take it off the list"


def public_functions(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Each class of a header with the names of its public functions."""
    text = code(path)
    function = re.compile(r"(?! |using|friend|struct|class|enum)[^(=]*?(~?\w+|operator\S+)\(")
    for head in re.finditer(r"^( *)(class|struct) (\w+)[^;{()]*\{$", text, re.M):
        body, _, _ = text[head.end() :].partition(f"\n{head[1]}}};")
        public, names = head[2] == "struct", set()
        for line in body.splitlines():
            if access := re.match(rf"{head[1]} (public|private|protected):", line):
                public = access[1] == "public"
            elif public and (match := function.match(line.removeprefix(f"{head[1]}  "))):
                names |= {match[1]} - {head[3], f"~{head[3]}"} if "override" not in line else set()
        yield head[3], names


def test_a_class_has_few_public_functions() -> None:
    counts = {
        f"{short(path)} {name}": len(names)
        for path in CSRC
        if path.suffix == ".h"
        for name, names in public_functions(path)
    }
    assert max(counts.values()) > 10, "functions are not found where they are"
    wide = {name: count for name, count in counts.items() if count > PUBLIC_FUNCTIONS}
    grown = {name: count for name, count in wide.items() if count > WIDER.get(name, 0)}
    assert not grown
    assert set(WIDER) <= set(wide), "no longer wide: take it off the list"


def lines_of_code(paths: list[Path]) -> int:
    lines = [line.strip() for path in paths for line in path.read_text().splitlines()]
    return len([line for line in lines if line and not line.startswith("//")])


def test_the_engine_stays_small() -> None:
    beside = [path for path in CSRC if path.parent.name == "verify"]
    assert lines_of_code([path for path in CSRC if path not in beside]) < CPP_TOTAL
    assert lines_of_code(beside) < PLANNER_TOTAL


def test_cmake_names_every_source() -> None:
    """Explicit lists, so that a forgotten file is found here and not at link time, or never."""
    listed = re.sub(r"#.*", "", (ROOT / "CMakeLists.txt").read_text()).split()
    words = {word.strip("()") for word in listed}
    words |= {Path(word).stem for word in words}
    programs = files("tests/cpp", "benchmarks/cpp", ends=(".cc",))
    forgotten = [short(p) for p in CSRC if p.suffix == ".cc" and p.name not in words]
    forgotten += [short(p) for p in programs if p.stem not in words]
    assert not forgotten


def test_every_room_has_tests_nearby() -> None:
    """`make check` finds some for a file of each folder, and for each module beside these."""
    sources = files("csrc", "ringcomm", ends=(".cc", ".cu", ".py"))
    by_folder = {path.parent: path for path in sources}
    beside = [path for path in sources if path.parent == ROOT / "ringcomm"]
    always = near("README.md")
    for name in (str(path.relative_to(ROOT)) for path in [*by_folder.values(), *beside]):
        tests = near(name) - always
        assert tests, name
        assert all((ROOT / test.partition("::")[0]).exists() for test in tests), (name, tests)
    assert "tests/tools/test_doctor_rules.py" in near("ringcomm/tools/doctor/findings.py")
    assert "tests/cpp/test_cpp.py::test_program[quantize_test]" in near("csrc/reduce/quantize.cc")


def near(name: str) -> set[str]:
    """Return the tests that scripts/check.sh runs for a file."""
    command = [str(ROOT / "scripts" / "check.sh"), "--list", name]
    return {*subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")}


def test_nothing_points_outside() -> None:
    ends = (".h", ".cc", ".cu", ".py", ".pyi", ".md", ".sh", ".in", ".toml", ".txt", ".rst")
    inside = ["csrc", "ringcomm", "lab", "tests", "benchmarks", "examples", "docs", "scripts"]
    paths = files(*inside, ends=ends)
    paths += [p for p in ROOT.iterdir() if p.is_file()] + [ROOT / ".ci" / "run"]
    wrong = [
        f"{short(path)}: {match.group()}"
        for path in paths
        if path.name != "_build_info.py"
        for match in [ELSEWHERE.search(path.read_text())]
        if match
    ]
    assert not wrong


def test_the_path_of_imports_stays() -> None:
    """Files share code by lab/, which every one of them finds: see lab/__init__.py."""
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


# ---- the floors of the package

# Rooms of ringcomm/, floor by floor: imports go down only, those inside functions, too. The one
# module above all is ringcomm/__init__.py.
FLOORS = [
    {"_text", "_build_info", "options"},
    {"_network", "_runtime"},
    {"_flight"},
    {"algorithms", "compression"},
    {"elastic", "hooks", "plan", "torchft"},  # two former names, and another library's
    {"tools"},
    {"__main__"},
]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in files("ringcomm", ends=(".py",))
}


def imported(name: str) -> set[str]:
    """The modules of the package that a module names in its imports, wherever these are."""
    named = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            named |= below or {node.module}
    return (named & MODULES.keys()) - {name, "ringcomm"}


def test_imports_of_the_package_go_down() -> None:
    rooms = {name: name.split(".")[1] for name in MODULES if name != "ringcomm"}
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    assert {*rooms.values()} == floor.keys()
    wrong = [
        f"{name} imports {other}"
        for name, room in rooms.items()
        for other in imported(name)
        if rooms[other] != room and floor[rooms[other]] >= floor[room]
    ]
    assert not wrong


def test_no_module_of_the_package_imports_itself() -> None:
    """Nor do modules in a cycle, also where that would work because a function imports."""
    left = {name: imported(name) for name in MODULES}
    while free := {name for name, others in left.items() if not others & left.keys()}:
        left = {name: others for name, others in left.items() if name not in free}
    assert not left, "a cycle, and what imports it"
