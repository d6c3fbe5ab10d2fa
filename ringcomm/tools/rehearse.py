"""`ringcomm elastic rehearse`: train on this machine while faults come.

Your script runs as it is, with so many ranks. At random, by a seed, ranks are killed, stopped and
told to leave, connections between them are cut, and checkpoints find the disk full. At the end one
page says whether your training kept the promises of docs/elastic.md, and what the faults cost it.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

EXAMPLES = (
    "ringcomm elastic rehearse train.py --epochs 90",
    "ringcomm elastic rehearse --ranks 4 --minutes 5 --seed 7 train.py",
    "ringcomm elastic rehearse --ranks 4 --unit 2 sharded.py",
    "ringcomm elastic rehearse --faults cut,fill train.py",
)
FAULTS = ("kill", "stop", "leave", "cut", "fill")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=3)
    add("--unit", type=int, default=1, help="of a sharded model: what the script gives to join")
    add("--minutes", type=float, default=5.0)
    add("--every", type=float, default=5.0, metavar="SECONDS", help="between faults, about")
    add("--faults", default=",".join(FAULTS), metavar="NAMES", help="those that come")
    add("--seed", type=int, help="of the faults (default: another one each time)")
    add("--keep", metavar="FOLDER", help="keep the ranks' logs and journals there")
    add("script", help="your training, and its arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def page(rehearsal: Any, verdict: Any, seed: int, out: IO[str]) -> bool:
    """Print the page; returns whether all was well."""

    def tell(text: str) -> None:
        print(text, file=out)

    tell(f"faults           {_faults(rehearsal)} (seed {seed})")
    tell(f"steps            {verdict.steps} in {verdict.seconds:.0f} s")
    tell(f"a step           {verdict.usual * 1e3:.1f} ms usually")
    tell(f"longest pause    {verdict.longest * 1e3:.0f} ms between two steps")
    tell(f"computed again   {verdict.aborted} steps, by a rank each")
    tell(f"changes          {verdict.changes}")
    tell(f"checkpoints      {_checkpoints(rehearsal, verdict)}")
    if rehearsal.uncut and not rehearsal.faults["cut"]:
        tell(f"No connection was cut: {rehearsal.uncut}.")
    if rehearsal.ended:
        tell("The training came to its end: give it more to do for a longer rehearsal.")
    for problem in [*verdict.broken[:20], *rehearsal.failures]:
        tell(f"BROKEN: {problem}")
    well = not (verdict.broken or rehearsal.failures)
    if well:
        tell(
            "Kept: every step was applied by all members or none, with equal parameters; no batch "
            "was used twice, and none is missing; no member was lost that had not ended."
        )
    return well


def _faults(rehearsal: Any) -> str:
    counts = [f"{rehearsal.faults[name]} x {name}" for name in rehearsal.kinds]
    if rehearsal.connections:
        counts[rehearsal.kinds.index("cut")] += f" ({rehearsal.connections} connections)"
    return ", ".join(counts)


def _chosen(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if wrong := [kind for kind in kinds if kind not in FAULTS]:
        raise ValueError(f"--faults {','.join(wrong)}: choose from {', '.join(FAULTS)}")
    return kinds


def _checkpoints(rehearsal: Any, verdict: Any) -> str:
    full = rehearsal.faults["fill"]
    return f"{verdict.saved} written, " + (
        f"{verdict.unsaved} not, while the disk was full" if full else "the disk was never full"
    )


def run(options: argparse.Namespace) -> int:
    from ringcomm.elastic.store import serve  # with torch
    from ringcomm.tools.rehearsal import Rehearsal

    kinds = _chosen(options.faults)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    served = serve("127.0.0.1", 0)
    assert served is not None, "a free port is always there"
    folder = Path(options.keep or tempfile.mkdtemp(prefix="ringcomm-rehearsal-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if next(folder.glob("*.jsonl"), None):
        print(
            f"{folder} has the journals of another rehearsal, which would be judged with this one: "
            "give --keep another folder",
            file=sys.stderr,
        )
        return 1
    environment = {
        "OMP_NUM_THREADS": "1",
        "RINGCOMM_TRANSPORT": "tcp",  # as between hosts, so that there is something to cut
        **os.environ,
        "RINGCOMM_ELASTIC": f"127.0.0.1:{served.port}",
        "RINGCOMM_ELASTIC_RUN": f"rehearsal-{os.getpid()}",
        "RINGCOMM_ELASTIC_JOURNAL": str(folder),
        "WORLD_SIZE": str(options.ranks),
    }
    rehearsal = Rehearsal(options, folder, environment, random.Random(seed), kinds)
    try:
        rehearsal.run(options.minutes * 60)
    finally:
        rehearsal.end()
    well = page(rehearsal, rehearsal.judge(), seed, sys.stdout)
    if options.keep is None and well:
        shutil.rmtree(folder)
    else:
        print(f"The ranks' logs and journals are in {folder}")
    return int(not well)
