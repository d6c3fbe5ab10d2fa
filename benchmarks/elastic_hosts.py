"""How soon an elastic training goes on when another host loses a rank, or falls silent.

    python benchmarks/elastic_hosts.py                     # 20 kills and 20 cuts; needs root
    python benchmarks/elastic_hosts.py --rounds 3 --silence 5

Hosts are network namespaces of this machine: three, with a rank each, and the store with the first.
A round kills the rank of one of the other two hosts, and starts another one there; then it pulls
the cable of one, puts it back, and starts another one. Times are of the slowest survivor, to its
next step. A silent host is suspected after `--silence` seconds: RINGCOMM_RESUME_SECONDS. Then the
kills are made once more where these two hosts have another rank, which sees the end of the process.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from elastic_changes import PAUSE, next_changes, show

from lab import report
from lab.namespaces import missing
from lab.site import Site, site

HOSTS = 3
SECONDS = 60  # else a survivor hangs


def next_steps(place: Site, numbers: list[int], since: float) -> float:
    """Wait until each has made a step in the new world; return when the last of them did."""
    ends, deadline = [], time.monotonic() + SECONDS
    for number in numbers:
        while not (steps := place.steps_after(number, since)):
            assert time.monotonic() < deadline, f"rank {number} makes no step"
            time.sleep(0.001)
        ends.append(float(steps[0]["at"]))
    return max(ends)


def lose(place: Site, alive: dict[int, int], host: int, silent: bool) -> float:
    """Lose the rank of a host; returns how many ms the others were without a step."""
    victim = alive.pop(host)
    at = 0.0

    def cause() -> None:
        nonlocal at
        if silent:
            at = time.monotonic()
            place.hosts.cut(host)
        else:
            at = place.trainees.kill(victim)

    others = list(alive.values())
    works = max(float(e["at"]) for e in next_changes(place.trainees, others, cause))
    ended = next_steps(place, others, works)
    if silent:
        place.hosts.heal(host)
        place.trainees.kill(victim)
    return (ended - at) * 1e3


def join(place: Site, alive: dict[int, int], host: int) -> None:
    """Start a rank on a host, and wait until it trains."""
    others = list(alive.values())

    def start() -> None:
        namespace = place.hosts.namespaces[host]
        (alive[host],) = place.trainees.start(1, namespace=namespace, start=HOSTS)

    next_changes(place.trainees, others, start)
    place.trainees.await_events([alive[host]], "step", 5)


def measure(rounds: int, seed: int, silence: int, beside: list[int]) -> dict[str, list[float]]:
    """Return what each loss cost, in ms; `beside` are the hosts of further ranks, which stay."""
    chance, lost = random.Random(seed), dict[str, list[float]](killed=[], silent=[])
    if beside:
        lost = {"killed": []}
    settings = {"RINGCOMM_RESUME_SECONDS": str(silence), "RES_OPTIONS": "timeout:1 attempts:1"}
    plan: dict[str, Any] = {"epochs": 1 << 30, "dead_after": float(silence), "settings": settings}
    with (
        tempfile.TemporaryDirectory() as folder,
        site(HOSTS, Path(folder), 0, pause=PAUSE, **plan) as place,
    ):
        alive = dict(enumerate(place.start(*range(HOSTS), *beside)))
        for round_ in range(rounds):
            report.progress(f"round {round_ + 1} of {rounds}")
            for name in lost:
                time.sleep(chance.uniform(0.0, 0.05))  # at any place of a step
                host = chance.randrange(1, HOSTS)
                lost[name].append(lose(place, alive, host, name == "silent"))
                join(place, alive, host)
    report.progress("")
    return lost


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--silence", type=int, default=3, help="seconds")
    options = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    lost = measure(options.rounds, options.seed, options.silence, [])
    beside = measure(options.rounds, options.seed, options.silence, [1, 2])["killed"]
    print(f"{HOSTS} hosts, a rank each, steps of {PAUSE * 1e3:.0f} ms, {options.rounds} rounds:")
    print(f"  {'kill -9 on another host':36}{show(lost['killed'], 'ms')}")
    print(f"  {'the same, beside another rank':36}{show(beside, 'ms')}")
    print(f"  {f'a host silent for {options.silence:g} s':36}{show(lost['silent'], 'ms')}")
    figures = {**lost, "beside": beside}
    record = {"machine": report.machine(), "silence": options.silence, "figures": figures}
    report.write_json(options.json, "elastic hosts", record)


if __name__ == "__main__":
    main()
