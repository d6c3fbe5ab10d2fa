"""Print the packages of requirement files that are not installed here, in any version."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


lines = [line for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
packages = {line.partition("==")[0] for line in lines if "==" in line and line[0] != "#"}
print(*sorted(package for package in packages if not installed(package)))
