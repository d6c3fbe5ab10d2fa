"""README.md and README.zh-CN.md stay in step: what is no prose is the same in both.

Sentences are compared by nobody, but for the names of code and the links in them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest

from documents import blocks_of, links, without_code

from lab import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
HEADING = re.compile(r"^(#+) .+$", re.M)
COMMENT = re.compile(r" +# .*")
FIGURE = re.compile(r"\d+(?:[.,]\d+)*")


def code(language: str, text: str) -> str:
    """The block, without its comments where it has any."""
    return COMMENT.sub("", text) if language in ("bash", "python") else text


def test_blocks_of_code_are_the_same() -> None:
    english, chinese = (
        [(one.language, one.directive, code(one.language, one.text)) for one in blocks_of(page)]
        for page in (ENGLISH, CHINESE)
    )
    assert len(english) > 10
    assert chinese == english


def test_comments_of_blocks_are_translated() -> None:
    """The same lines have one."""
    for one, other in zip(blocks_of(ENGLISH), blocks_of(CHINESE), strict=True):
        lines = zip(one.text.splitlines(), other.text.splitlines(), strict=True)
        for line, translated in lines:
            assert bool(COMMENT.search(line)) == bool(COMMENT.search(translated)), str(other)


def test_headings_are_the_same() -> None:
    english, chinese = (HEADING.findall(without_code(page)) for page in (ENGLISH, CHINESE))
    assert len(english) > 8
    assert chinese == english


@dataclass(frozen=True)
class Section:
    """What two translations of a section have in common."""

    links: list[str]
    code: Counter[str]
    figures: Counter[str]  # of the whole text
    tables: list[list[Counter[str]]]  # the figures of each cell, by rows

    @classmethod
    def read(cls, text: str) -> Section:
        rows = [row.strip("|").split(" | ") for row in text.splitlines() if row.startswith("|")]
        figures = [[Counter(FIGURE.findall(cell)) for cell in row] for row in rows]
        targets = sorted(re.findall(r"\]\(([^)\s]+)\)", text))
        names = Counter(re.findall(r"`([^`\n]+)`", text))
        return cls(targets, names, Counter(FIGURE.findall(text)), figures)


def test_links_names_and_figures_are_the_same() -> None:
    english, chinese = (
        re.split(r"^#+ .+$", without_code(page), flags=re.M) for page in (ENGLISH, CHINESE)
    )
    # Each links to the other one, first of all.
    assert links(ENGLISH)[0] == CHINESE.name
    assert links(CHINESE)[0] == ENGLISH.name
    chinese[1] = chinese[1].replace(ENGLISH.name, CHINESE.name, 1)
    assert sum(len(Section.read(one).code) for one in english) > 50
    for one, other in zip_longest(english, chinese, fillvalue=""):
        assert Section.read(other) == Section.read(one), other[:80]
