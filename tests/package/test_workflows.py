"""The workflows and forms of GitHub: they name commands, files and tests that exist.

They are read as text, because no package that reads YAML is sure to be here.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import ROOT
from ringcomm.__main__ import parse

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
ASSIGNMENT = re.compile(r"\w+=")


def scripts_of(text: str) -> Iterator[str]:
    """Yield the script of each `run:`, on one line or in a block that follows."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not (match := re.match(r"( *(?:- )?)run: (.*)$", line)):
            continue
        block: list[str] = []
        for below in lines[number + 1 :]:
            if below.strip() and not below.startswith(" " * (len(match[1]) + 1)):
                break
            block.append(below.strip())
        folded = match[2].startswith(">")
        yield (" " if folded else "\n").join(block) if match[2][0] in "|>" else match[2]


def commands_of(script: str) -> Iterator[list[str]]:
    """Yield the words of each command, without variables and sudo before it."""
    for line in script.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.shlex(line, posix=True, punctuation_chars=True), ";"]:
            if set(word) <= set(";|&"):
                yield words
                words = []
            elif words or not (ASSIGNMENT.match(word) or word == "sudo"):
                words.append(word)


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.M))


def missing_from(script: str) -> list[str]:
    """Return the targets and scripts that a script names and the repository doesn't have."""
    missing = []
    for words in commands_of(script):
        program, *rest = words or [""]
        if program == "make":
            missing += [word for word in rest[:1] if word not in targets()]
        elif program.startswith((".ci/", "scripts/")) and not os.access(ROOT / program, os.X_OK):
            missing.append(program)
    return missing


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_exists(path: Path) -> None:
    text = path.read_text()
    scripts = list(scripts_of(text))
    assert scripts
    assert any(" make " in f" {script}" or ".ci/run" in script for script in scripts)
    assert not [name for script in scripts for name in missing_from(script)]
    assert not [use for use in re.findall(r"uses: \./(\S+)", text) if not (ROOT / use).exists()]


def test_a_name_that_does_not_exist_is_noticed() -> None:
    text = "  - run: |\n      make lint && make demos\n  - run: sudo A=1 scripts/none.sh | cat\n"
    assert [missing_from(script) for script in scripts_of(text)] == [["demos"], ["scripts/none.sh"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_little_and_ends(path: Path) -> None:
    text = path.read_text()
    assert "\npermissions:\n  contents: read\n" in text
    assert "\nconcurrency:\n" in text
    jobs = re.split(r"^  (?=[a-z][\w-]*:$)", text.partition("\njobs:\n")[2], flags=re.M)[1:]
    assert jobs
    assert not [job for job in jobs if not re.search(r"^    (timeout-minutes|uses): ", job, re.M)]


def test_each_test_is_in_one_part_of_the_night() -> None:
    text = (GITHUB / "workflows" / "nightly.yml").read_text()
    named = [word for row in re.findall(r"^ +- (tests/.*)$", text, re.M) for word in row.split()]
    files = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(named) == sorted({f"tests/{path.parts[0]}" for path in files})


def documented(text: str) -> Iterator[str]:
    """Yield the commands of ringcomm that a form asks for."""
    fenced = re.findall(r"```\n(.*?)```", text, re.S)
    lines = [line.strip() for block in fenced for line in block.splitlines()]
    for line in [*lines, *re.findall(r"`(ringcomm [^`\n]+)`", text)]:
        command = line.partition("-m ")[2] if line.startswith("torchrun") else line
        if command.startswith("ringcomm "):
            yield command


def test_forms_ask_for_commands_that_exist() -> None:
    seen = set()
    for path in FORMS:
        for command in documented(path.read_text()):
            words = shlex.split(command, comments=True)[1:]
            seen.add(words[0])
            if words == ["--version"]:
                continue
            parse(words)  # exits where it is no command line
    assert {"--version", "doctor", "trace", "bench"} <= seen


@pytest.mark.parametrize("path", [*FORMS, ROOT / "SECURITY.md"], ids=lambda path: path.name)
def test_links_of_a_form_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\((?:\.\./blob/HEAD/)?([\w./-]+\.md)\)", path.read_text())
    assert not [link for link in links if not (ROOT / link).exists()]
