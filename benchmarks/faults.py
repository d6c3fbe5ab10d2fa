"""The fault table: what is done to a job, and what it does then, ringcomm beside Gloo.

    python benchmarks/faults.py                                # the short forms
    python benchmarks/faults.py --only resets,blackhole --backends ringcomm,gloo
    python benchmarks/faults.py --wan 300,25                   # round trips of 50 ms
    python benchmarks/faults.py --tls                          # encrypted, but not Gloo's
    python benchmarks/faults.py --long --json faults.json      # hours

Most rows need several hosts, which are network namespaces: root, iproute2 and nftables. "yes" is
what was wanted; every result of every operation is compared, on every backend.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from typing import Any

from lab import report
from lab.faults.rows import ROWS
from lab.faults.table import Fault, Form, Verdict, table
from lab.namespaces import missing


def judge(fault: Fault, form: Form) -> tuple[Verdict, float]:
    """Return what happened, and how many seconds it took."""
    began = time.monotonic()
    try:
        verdict = fault.run(form)
    except Exception as error:  # noqa: BLE001  the other rows are worth having
        verdict = Verdict(False, f"the test itself failed: {error}")
    return verdict, time.monotonic() - began


def chosen(options: Any) -> list[Fault]:
    unknown = set(options.only) - {fault.name for fault in ROWS}
    if unknown:
        sys.exit(f"no such row: {', '.join(sorted(unknown))}")
    reason = missing()
    rows = [fault for fault in ROWS if not options.only or fault.name in options.only]
    rows = [fault for fault in rows if fault.short or options.long]
    if reason and any(fault.namespaces for fault in rows):
        print(f"left out what needs several hosts: {reason}", file=sys.stderr)
        rows = [fault for fault in rows if not fault.namespaces]
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    names = report.list_of(str)
    parser.add_argument("--long", action="store_true", help="as long as in a soak")
    parser.add_argument("--backends", type=names, default=["ringcomm", "gloo"])
    parser.add_argument("--only", type=names, default=[], help="names of rows: resets,blackhole")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wan", default="", metavar="MBIT,MS[,PERCENT]", help="over long links")
    parser.add_argument("--tls", action="store_true", help="connections are encrypted")
    options = parser.parse_args()
    os.environ["LAB_WAN"] = options.wan
    if options.tls:
        os.environ.update(RINGCOMM_TLS="on", RINGCOMM_SECRET="of this table")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # programs of the rows inherit it
    facts, told, rows = report.machine(), [], []
    for fault in chosen(options):
        verdicts: dict[str, Verdict] = {}
        for backend in options.backends:
            if backend != "ringcomm" and not fault.elsewhere:
                continue
            report.progress(f"{fault.name} on {backend}")
            verdict, seconds = judge(fault, Form(backend, options.long, options.seed))
            verdicts[backend] = verdict
            row = {"fault": fault.name, "done": fault.done, "wanted": fault.wanted}
            took = round(seconds, 1)
            rows.append({**row, "backend": backend, **dataclasses.asdict(verdict), "seconds": took})
        told.append((fault, verdicts))
    report.progress("")
    print(table(told))
    asked = {name: getattr(options, name) for name in ("long", "seed", "wan", "tls")}
    body = {"machine": facts, **asked, "rows": rows}
    report.write_json(options.json, "faults", body)


if __name__ == "__main__":
    main()
