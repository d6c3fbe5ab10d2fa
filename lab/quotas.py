"""Cgroups that give each process, or each thread, a share of a core's time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ringcomm.tools.bench.measured import BenchmarkError

CGROUPS = Path("/sys/fs/cgroup")
FOLDER = "ringcomm-quotas-"  # and the number of this process
PERIOD = 100_000  # microseconds after which a process may run again: the kernel's own


class Quotas:
    """A folder of cgroups, by version 1 or 2. A context manager: they go with it.

    A run that was killed leaves empty ones, which the next run removes.
    """

    def __init__(self, share: float, period: int = PERIOD, *, threaded: bool = False) -> None:
        """`threaded`: they are for threads, which `adopt` and `file` put there."""
        self.share, self.period, self.threaded = share, period, threaded
        first = CGROUPS / "cpu"
        self.is_first = (first / "cpu.cfs_quota_us").exists()
        self.root = first if self.is_first else CGROUPS
        self.file = "tasks" if self.is_first else "cgroup.threads"  # for a thread's number
        self.made = 0

    def __enter__(self) -> Quotas:
        if os.geteuid() != 0:
            raise BenchmarkError("shares of cores are cgroups, and only root can make those")
        self.own = self.root / f"{FOLDER}{os.getpid()}"
        try:
            self.remove()
            self.own.mkdir()
            if not self.is_first:
                (self.root / "cgroup.subtree_control").write_text("+cpu")
                if not self.threaded:
                    (self.own / "cgroup.subtree_control").write_text("+cpu")
        except OSError as error:
            raise BenchmarkError(f"cannot make cgroups: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove what this run, or one that is gone, has made."""
        for old in self.root.glob(FOLDER + "*"):
            number = int(old.name.removeprefix(FOLDER))
            if number != os.getpid() and Path(f"/proc/{number}").exists():
                continue
            for folder in [*old.glob("*/"), old]:
                with contextlib.suppress(OSError):  # a thread is still ending
                    folder.rmdir()

    def folders(self, count: int) -> list[Path]:
        """Make `count` cgroups, each with the quota."""
        return [self._make() for _ in range(count)]

    def _make(self) -> Path:
        folder = self.own / str(self.made)
        self.made += 1
        folder.mkdir()
        quota = round(self.share * self.period)
        if self.is_first:
            (folder / "cpu.cfs_period_us").write_text(str(self.period))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            return folder
        if self.threaded:
            (folder / "cgroup.type").write_text("threaded")
            (self.own / "cgroup.subtree_control").write_text("+cpu")
        (folder / "cpu.max").write_text(f"{quota} {self.period}")
        return folder

    def take(self, processes: list[int]) -> None:
        """Give each process a cgroup of its own."""
        for process, folder in zip(processes, self.folders(len(processes)), strict=True):
            (folder / "cgroup.procs").write_text(str(process))

    def adopt(self, processes: list[int]) -> None:
        """Take processes in: version 2 divides threads only among folders below their process's."""
        for process in processes if not self.is_first else []:
            (self.own / "cgroup.procs").write_text(str(process))
