"""`ringcomm trace`: says from the flight records of a job's ranks what went wrong.

It reads the folder in which the ranks left them, of a job that runs or has ended. The exit status
is 0 where nothing is wrong, 1 where something is, 2 where nothing can be read, or not of all ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ringcomm._flight.processes import Life
from ringcomm._flight.records import Folder, GroupRecord, by_job, newest_folder, read_folder
from ringcomm._flight.torch_format import write_flight_recorder
from ringcomm._text import output, positive, ranks_text
from ringcomm.tools.trace.analysis import analyse
from ringcomm.tools.trace.clocks import align, set_clocks
from ringcomm.tools.trace.findings import Finding
from ringcomm.tools.trace.job import FRESH_NS, Job, groups_of
from ringcomm.tools.trace.tell import tell
from ringcomm.tools.trace.waiting import FEW, is_young, place_of, stops, young

WELL, WRONG, UNREADABLE = 0, 1, 2  # the last also where ranks left no record
EXAMPLES = (
    "ringcomm trace                               your latest job on this host",
    "ringcomm trace records/                      the folder that RINGCOMM_TRACE named",
    "ringcomm trace records/ --html trace.html    a page with figures",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        help="where the ranks left their records: else RINGCOMM_TRACE, or your latest job's",
    )
    parser.add_argument("--job", help="which job, where the folder has several: else the latest")
    parser.add_argument(
        "--perfetto", type=output, metavar="FILE", help="write a trace for Perfetto"
    )
    parser.add_argument("--html", type=output, metavar="FILE", help="write a page with figures")
    parser.add_argument(
        "--torch", type=Path, metavar="DIR", help="write files for torch's torchfrtrace"
    )
    parser.add_argument(
        "--last",
        type=positive,
        metavar="N",
        help="draw only the newest N operations of each rank (1000 for Perfetto, 100 for the page)",
    )


def run(options: argparse.Namespace) -> int:
    try:
        path = newest_folder(options.folder)
        folder = read_folder(path)
        job = job_of(folder, options.job)
    except (OSError, ValueError) as error:
        print(f"ringcomm trace: {error}", file=sys.stderr)
        return UNREADABLE
    findings = analyse(job)
    chosen = [] if path == options.folder else [f"the records are in {path}"]
    tell(job, findings, [*chosen, *job.remarks, *young(job), *fresh(job), *next_steps(job)])
    export(job, findings, options)
    return WRONG if findings else UNREADABLE if job.silent else WELL


def fresh(job: Job) -> list[str]:
    """Warn where the job may run still."""
    age = time.time_ns() - job.end
    known = {*job.lives.values()}
    if Life.LIVES in known:
        return ["the job runs: look again whether it goes on"]
    if job.records and 0 <= age < FRESH_NS and known != {Life.GONE}:
        return ["the records are seconds old: if the job runs, look again whether it goes on"]
    return []


def next_steps(job: Job) -> list[str]:
    """Say how to learn where a rank is that keeps the others waiting."""
    missing = [
        stop.group.records[rank]
        for stop in stops(job)
        if not is_young(job, stop)
        for rank in stop.missing
        if rank in stop.group.records
    ]
    asked = {
        record.process: record
        for record in missing
        if job.lives[record.process] == Life.LIVES and not place_of(job, record)
    }
    if not 0 < len(asked) <= FEW:
        return []
    commands = "; ".join(f"`kill -USR2 {own.pid}` on {own.host}" for own in asked.values())
    return [f"to see the line of code, run {commands}, then this command again"]


def export(job: Job, findings: list[Finding], options: argparse.Namespace) -> None:
    """Write what was asked for. Raises OSError, and ValueError where a package is missing."""
    if options.torch:
        paths = write_flight_recorder(job.records, options.torch)
        print(f"{len(paths)} files for torchfrtrace are in {options.torch}")
    if options.perfetto:
        from ringcomm.tools.trace.perfetto import write_perfetto

        write_perfetto(job, options.perfetto, options.last or 1000)
        print(f"{options.perfetto} is for ui.perfetto.dev")
    if options.html:
        from ringcomm.tools.trace.html import write_page

        write_page(job, findings, options.html, options.last or 100)
        print(f"{options.html} is for a browser")


def job_of(folder: Folder, name: str | None = None) -> Job:
    """Make the job of a folder's records: the latest, or the one of that name.

    Raises ValueError where there is none.
    """
    jobs = by_job(folder.records)
    if not jobs:
        why = f": {folder.remarks[0]}" if folder.remarks else ""
        raise ValueError(f"there is no flight record that can be read{why}")
    if name is not None and name not in jobs:
        raise ValueError(f"there is no job {name}: the folder has {', '.join(jobs)}")
    chosen = list(jobs)[-1] if name is None else name
    job = Job(chosen, groups_of(jobs[chosen]), list(folder.remarks), unread=folder.unread)
    others = [other for other in jobs if other != chosen]
    if others:
        count = sum(len(jobs[other]) for other in others)
        job.remarks.append(
            f"{count} records are of other jobs and left out: --job takes {', '.join(others)}"
        )
    job.remarks += differences(job.records)
    if job.silent:
        job.remarks.append(f"{job.no_record(job.silent)} in this folder")
    set_clocks(job)
    align(job)
    return job


def differences(records: list[GroupRecord]) -> list[str]:
    """Say which ranks run other versions than the others."""
    remarks = []
    for package in ("ringcomm", "torch"):
        versions: dict[str, list[int]] = {}
        for record in records:
            versions.setdefault(getattr(record, package) or "?", []).append(record.global_rank)
        if len(versions) > 1:
            parts = [f"{version} on {ranks_text(ranks)}" for version, ranks in versions.items()]
            remarks.append(f"the ranks have different versions of {package}: {', '.join(parts)}")
    return remarks
