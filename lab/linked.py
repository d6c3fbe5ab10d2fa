"""The symbols of shared libraries, as binutils see them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

# Each module computes them alike, or only its own threads use them.
HARMLESS = re.compile(r"ringcomm::ticks\(\)::steady")


def newest_versions(library: Path) -> dict[str, tuple[int, ...]]:
    """Return the newest versions of symbols that a library needs, as {"GLIBC": (2, 28)}."""
    table = subprocess.run(
        ["objdump", "-T", str(library)], capture_output=True, text=True, check=True
    ).stdout
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(r"\*UND\*.*\((GLIBC|GLIBCXX|CXXABI)_([\d.]+)\)", table):
        number = tuple(map(int, version.split(".")))
        newest[name] = max(newest.get(name, ()), number)
    return newest


def unversioned_functions(library: Path) -> set[str]:
    """Return the C functions that a library needs without naming a version of them.

    Python's are such, and so are those that the libc did not have for which it was linked.
    """
    table = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"^ +U ((?!_Z)[^@\s]+)$", table, re.MULTILINE))


def variables(library: Path) -> set[str]:
    """Return the variables of ringcomm that a library has one of itself."""
    table = subprocess.run(
        ["nm", "-C", str(library)], capture_output=True, text=True, check=True
    ).stdout
    table += subprocess.run(
        ["nm", "-CD", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"^\w+ [bBdDuvV] ((?:guard variable for )?ringcomm::.*)$", table, re.M))


def common_variables(first: Path, second: Path) -> set[str]:
    """Return those that two libraries of a process would each have: state that is in two parts."""
    return {name for name in variables(first) & variables(second) if not HARMLESS.search(name)}
