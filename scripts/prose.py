"""Lint for prose: `make lint` runs it. Each rule is a function that yields complaints.

PYTHONPATH=. python scripts/prose.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lab import ROOT
from lab.documents import PAGES, Block, blocks_of, links, without_code

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
CPP_COLUMNS = 100  # clang-format leaves long words in comments alone
PAGE_COLUMNS = 120
NOTHING = "\N{EN DASH}"  # a table's cell without a source
RETIRED = {  # words that had two meanings, or were pictures of our own, and what to write instead
    "circle": "subgroup",
    "inquiry": "diagnosis",
    "keeper": "network thread",
    "nap": "interval",
    "sequel": "continuation",
    "settle": "reclaim (lent memory), wait (for a device), decide",
    "shelf": "deferred release",
    "surroundings": "backend state",
    "team": "device communicator",
    "wish": "request, requested algorithm",
    "whoever": "the rank, the thread, the caller",
}
VAGUE = {"one", "found", "each"}  # they name anything
DOCUMENTED = ("ringcomm/algorithms/proof.py", "found")  # docs/api.md has Counterexample.found
HEADING = re.compile(r"^(#+) .+$", re.M)
COMMENT = re.compile(r" +# .*")
FIGURE = re.compile(r"\d+(?:[.,]\d+)*")


def sources(*ends: str) -> list[Path]:
    folders = ("csrc", "ringcomm", "lab", "tests", "benchmarks", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return sorted(
        path
        for path in paths
        if path.suffix in ends and "__pycache__" not in path.parts and not path.is_symlink()
    )


def words_of(text: str) -> Iterator[str]:
    """Split `DeviceComm` and `device_comm` into the same words."""
    return (word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text))


def retired_words() -> Iterator[str]:
    forms = {word + end: text for word, text in RETIRED.items() for end in ("", "s", "d")}
    pages = [ENGLISH, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for path in [*sources(".h", ".cc", ".cu", ".py"), *pages]:
        for word in sorted(forms.keys() & set(words_of(path.read_text()))):
            yield f"{path.relative_to(ROOT)}: not {word}, but {forms[word]}"


def openings() -> Iterator[str]:
    """A comment that begins with "Of" or "What" is a telegram: see docs/style.md."""
    for path in sources(".h", ".cc", ".cu", ".py"):
        place = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.match(r' *(?://|#|""") ?(Of|What) ', line):
                yield f"{place}:{number}: {line.strip()}"


def given_names(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """Yield the line and the name of each variable, parameter, attribute, function and class."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.ExceptHandler(name=name)
                | ast.alias(asname=name)
            ):
                yield node.lineno, name


def vague_names() -> Iterator[str]:
    for path in sources(".py"):
        place = str(path.relative_to(ROOT))
        for number, name in given_names(ast.parse(path.read_text())):
            if name in VAGUE and (place, name) != DOCUMENTED:
                yield f"{place}:{number}: {name} names anything: say what it is"


def columns() -> Iterator[str]:
    for path in sources(".h", ".cc", ".cu"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if len(line) > CPP_COLUMNS:
                yield f"{path.relative_to(ROOT)}:{number}: {len(line)} columns"
    for path in PAGES:
        # Tables and the addresses that links lead to cannot be wrapped.
        for line in re.sub(r"`[^`\n]+`", "", without_code(path)).splitlines():
            if len(line) > PAGE_COLUMNS and not re.match(r"\||\[[\w-]+\]: ", line):
                yield f"{path.relative_to(ROOT)}: {len(line)} columns: {line[:50]}…"


def sources_of_claims() -> Iterator[str]:
    """docs/compare.md says nothing about another library without a source and its date."""
    page = (ROOT / "docs" / "compare.md").read_text()
    days = re.findall(r"read on (\d{4}-\d\d-\d\d)", page)
    defined = dict(re.findall(r'^\[([\w-]+)\]: https://\S+ "read (\S+)"$', page, re.M))
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", page, re.M)]
    cells = [cell for row in rows for cell in row[2:]]
    claims = [cell for cell in cells if not re.fullmatch(rf"[\w .]+ \d\.\d+|Gloo|{NOTHING}", cell)]
    if len(claims) < 60:
        yield "docs/compare.md: the table of claims is not where this script looks for it"
    # Our own measurement of Gloo is a source, too.
    source = re.compile(r"\]\[[\w-]+\]|\(faults\.md\)")
    for cell in claims:
        if not source.search(cell):
            yield f"docs/compare.md: no source for: {cell}"
    used = {name for cell in claims for name in re.findall(r"\]\[([\w-]+)\]", cell)}
    for name in sorted(used ^ set(defined)):
        yield f"docs/compare.md: source {name} is only {'used' if name in used else 'defined'}"
    if set(defined.values()) != set(days) or len(days) != 1:
        yield "docs/compare.md: sources were read on other days than the page says"


def code_of(block: Block) -> tuple[str, str, str]:
    """A block as both languages must have it: without its comments, which are translated."""
    commented = block.language in ("bash", "python")
    text = COMMENT.sub("", block.text) if commented else block.text
    return block.language, block.directive, text


def translation_of_blocks() -> Iterator[str]:
    english, chinese = list(blocks_of(ENGLISH)), list(blocks_of(CHINESE))
    if len(english) != len(chinese):
        yield f"{CHINESE.name} has {len(chinese)} blocks of code, {ENGLISH.name} {len(english)}"
    for ours, theirs in zip(english, chinese, strict=False):
        commented = [
            [bool(COMMENT.search(line)) for line in block.text.splitlines()]
            for block in (ours, theirs)
        ]
        if code_of(ours) != code_of(theirs) or commented[0] != commented[1]:
            yield f"{theirs} is not the translation of {ours}"


def facts_of(section: str) -> tuple[object, ...]:
    """Everything in a section that is no prose: links, names of code, figures by table cell."""
    rows = [row.strip("|").split(" | ") for row in section.splitlines() if row.startswith("|")]
    return (
        sorted(re.findall(r"\]\(([^)\s]+)\)", section)),
        Counter(re.findall(r"`([^`\n]+)`", section)),
        Counter(FIGURE.findall(section)),
        [[Counter(FIGURE.findall(cell)) for cell in row] for row in rows],
    )


def translation_of_text() -> Iterator[str]:
    """README.zh-CN.md has README.md's headings, links, names of code and figures."""
    if links(ENGLISH)[0] != CHINESE.name or links(CHINESE)[0] != ENGLISH.name:
        yield f"{ENGLISH.name} and {CHINESE.name} do not begin with a link to each other"
    pages = [without_code(ENGLISH), without_code(CHINESE).replace(ENGLISH.name, CHINESE.name, 1)]
    if HEADING.findall(pages[0]) != HEADING.findall(pages[1]):
        yield f"{CHINESE.name} has other headings than {ENGLISH.name}"
    english, chinese = (re.split(r"^#+ .+$", page, flags=re.M) for page in pages)
    for ours, theirs in zip(english, chinese, strict=False):
        if facts_of(ours) != facts_of(theirs):
            yield f"{CHINESE.name} has other links, names or figures: {theirs.strip()[:60]}…"


RULES = [retired_words, openings, vague_names, columns, sources_of_claims]
RULES += [translation_of_blocks, translation_of_text]


def main() -> int:
    complaints = [complaint for rule in RULES for complaint in rule()]
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
