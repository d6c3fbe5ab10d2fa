"""The files in which flight records lie while a job runs, and what removes them.

Each group has one, in the folder RINGCOMM_TRACE. A setting for traces never ends a job: where there
can be no file the records stay in memory, and one line says so.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import shutil
import struct
import threading
import time
from pathlib import Path

from ringcomm._flight import processes
from ringcomm._flight.records import (
    FAILURE_AT,
    HEADER_END,
    LEFT_AT,
    SEEN_AT,
    header_of,
    process_in,
)
from ringcomm._runtime.options import of_process, warn

KEPT, KEPT_FAILED = 8, 64  # files of groups that are gone when another group is made
JOBS, BYTES, SECONDS = 16, 64 << 20, 7 * 86400  # in the temporary folder, of jobs that are gone

_lock = threading.Lock()
_files: list[Path] = []  # of groups that live
_left: list[Path] = []  # of those that were destroyed
_failed: list[Path] = []  # of those that had failed before
_numbers = itertools.count()
_said: list[bool] = []


def _forget() -> None:
    """Begin anew in a forked child: the files are its parent's."""
    global _lock
    _lock = threading.Lock()
    for what in (_files, _left, _failed, _said):
        what.clear()


os.register_at_fork(after_in_child=_forget)


def make(rank: int, size: int) -> int:
    """Return the descriptor of a new file of so many bytes, or -1. The library calls this."""
    folder = of_process("trace")
    if not folder or folder == "off":
        return -1
    try:
        with _lock:
            return make_in(Path(folder), rank, size)
    except Exception as error:  # noqa: BLE001  a program does not end because of its records
        if not _said:
            _said.append(True)
            why = getattr(error, "strerror", None) or error
            warn(f"RINGCOMM_TRACE={folder}: {why}: flight records are kept in memory")
        return -1


def make_in(folder: Path, rank: int, size: int) -> int:
    prune()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}-{os.getpid()}-{next(_numbers)}.ring"
    # A process of this number in another container may write to the old one: it is not cut.
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        end = processes.written(processes.this_process())
        # Blocks that are missing when they are written to would end the program by a signal.
        os.posix_fallocate(file, 0, size + len(end))
        os.pwrite(file, end, size)
        mmap.mmap(file, size).close()
    except BaseException:
        os.close(file)
        path.unlink(missing_ok=True)  # its blocks may be the last of the disk
        raise
    _files.append(path)
    return file


def prune() -> None:
    """Remove files of groups that were destroyed, but for the newest."""
    for path in [*_files]:
        head = head_of(path)
        if head is None or head[LEFT_AT]:
            _files.remove(path)
        if head is not None and head[LEFT_AT]:
            (_failed if head[FAILURE_AT] else _left).append(path)
    for paths, most in ((_left, KEPT), (_failed, KEPT_FAILED)):
        while len(paths) > most:
            with contextlib.suppress(OSError):
                paths.pop(0).unlink()


def head_of(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            head = file.read(HEADER_END)
    except OSError:
        return None
    return head if len(head) == HEADER_END else None


def there_in(folder: Path) -> set[tuple[str, int, bool]]:
    """Return the name, meeting and memory of the groups whose files are in a folder."""
    found = set()
    with _lock:
        for path in (*_files, *_left, *_failed):
            head = head_of(path) if path.parent.resolve() == folder.resolve() else None
            if head is not None:
                about = header_of(head)
                found.add((about["group"], about["meeting"], about["device"]))
    return found


def beat() -> None:
    """Note in one of the files that this process lives."""
    with _lock:
        for path in reversed(_files):
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.pwrite(file, struct.pack("<q", time.time_ns()), SEEN_AT)
                    return
                finally:
                    os.close(file)


def clean(jobs: Path, mine: Path) -> None:
    """Remove folders of jobs that are gone: where there are many or large ones, and old ones.

    A folder stays while one of its processes lives. Where nobody can tell, because it is another
    container's or of another start of this host, it stays for a week. One of another host stays.
    """
    with contextlib.suppress(OSError):
        count = total = 0
        for folder in sorted(jobs.iterdir(), key=age):
            if folder == mine or folder.is_symlink() or not folder.is_dir():
                continue
            size = sum(file.lstat().st_size for file in folder.iterdir())
            count, total = count + 1, total + size
            old = age(folder) > SECONDS
            if (old or count > JOBS or total > BYTES) and is_over(folder, old):
                shutil.rmtree(folder, ignore_errors=True)
                count, total = count - 1, total - size


def age(folder: Path) -> float:
    return time.time() - folder.lstat().st_mtime


def is_over(folder: Path, old: bool) -> bool:
    """Tell whether all processes that wrote into a folder are gone."""
    found = [process_in(path) for path in folder.glob("*.ring")]
    if not found or any(host != os.uname().nodename for host, _ in found):
        return False
    lives = {processes.life_of(process) for _, process in found}
    return lives == {processes.Life.GONE} or (old and processes.Life.LIVES not in lives)
