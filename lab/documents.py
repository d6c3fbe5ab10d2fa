"""The pages that users read, taken apart: blocks of code, prose, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab import ROOT

# Each block of code of these is run or checked.
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples", "tests")),
]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.M | re.S)
DIRECTIVE = re.compile(r"<!-- test: ((?:(?!-->).)+?) -->\n *\Z", re.S)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    directive: str  # what the HTML comment before it says: "" where there is none
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    whole = page.read_text()
    for fence in FENCE.finditer(whole):
        said = DIRECTIVE.search(whole[: fence.start()])
        text = re.sub(f"^{fence['indent']}", "", fence["text"], flags=re.M)
        line = whole[: fence.start()].count("\n") + 1
        yield Block(page, line, fence["language"], said[1] if said else "", text)


def without_code(page: Path) -> str:
    """The page, its blocks and comments left out."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text()), flags=re.S)


def inline_code(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_code(page))


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        anchors.add(slug)
    return anchors


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_code(page))
