"""The command `ringcomm`, or `python -m ringcomm`: see `ringcomm --help`."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from ringcomm import costs

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]*)([KMG]?)", text.upper(), re.ASCII)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 8, 1K, 4M or 1G")
    return int(found[1]) * UNITS[found[2]]


def sizes(text: str) -> list[int]:
    return [size(word) for word in text.split(",")]


def ranks(text: str) -> list[int]:
    """Parse "2..4096", the powers of two from 2 to 4096, or "3,5,8"."""
    found = re.fullmatch(r"([1-9][0-9]*)\.\.([1-9][0-9]*)", text, re.ASCII)
    if found:
        low, high = int(found[1]), int(found[2])
        return [2**power for power in range(high.bit_length()) if low <= 2**power <= high]
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of ranks: write 2..4096, or 3,5,8")
    return [int(word) for word in text.split(",")]


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog="ringcomm", description="Tools for ringcomm.")
    commands = whole.add_subparsers(dest="command", required=True)
    tune = commands.add_parser(
        "tune",
        help="measure what messages cost between the ranks of a job",
        description="Measures what messages cost between the ranks of a job, and writes a file "
        "for RINGCOMM_COSTS. Start it as the job itself is: torchrun ... -m ringcomm tune",
    )
    tune.add_argument("--output", type=Path, metavar="FILE", help="rank 0 writes it")
    model = commands.add_parser(
        "model", help="how long a collective takes by the model, for any number of ranks"
    )
    add = model.add_argument
    add("--collective", choices=list(costs.ALGORITHMS), default="all_reduce")
    add("--bytes", type=sizes, default="1K,1M,64M", help="whole messages")
    add("--ranks", type=ranks, default="2..4096", help="2..4096 are powers of two; or 3,5,8")
    add("--local", type=int, default=1, help="ranks of a host")
    add("--costs", type=Path, metavar="FILE", help="what `ringcomm tune` has written")
    add("--plot", type=Path, metavar="FILE", help="draw it as well (needs matplotlib)")
    return whole


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.command == "tune":
            from ringcomm import tune

            return tune.run(options.output)
        from ringcomm import model

        return model.run(options)
    except (OSError, ValueError) as error:
        print(f"ringcomm {options.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
