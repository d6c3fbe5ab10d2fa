"""Flight records: what this rank did in its groups, written for those who ask afterwards.

The library keeps them in memory always, and in files of the folder RINGCOMM_TRACE as they are made:
here these files are made and removed. And here all records are written where something has gone
wrong: when a group fails, when a collective hangs, at an exit by an exception, at SIGUSR2, and when
the program asks. `ringcomm trace` reads them.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import itertools
import mmap
import os
import pickle
import select
import shutil
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringcomm._flight import processes, stats, stragglers, torch_format
from ringcomm._flight.records import (
    FAILURE_AT,
    HEADER_END,
    LEFT_AT,
    SEEN_AT,
    GroupRecord,
    Operation,
    header_of,
    process_in,
    read_ring,
    temporary_folders,
)
from ringcomm._runtime import lines as program_lines
from ringcomm._runtime.library import load_library
from ringcomm._runtime.process import say, setting

QUIET = 0.05  # seconds: what is told within belongs together
LOOK_EVERY = 1.0  # seconds: at other ranks, and for metrics
STILL = 10.0  # seconds after which a collective that waits counts as a hang
HANG_EVERY, HANG_AGAIN = 2.0, 60.0  # seconds between two looks for one, and after one
HANGING = 64  # newest operations among which one may hang
MOST = 1 << 20  # bytes of the pipe that are read at once
# Words of the pipe, which no text of faulthandler has.
FAILED = b"\1"  # the library's
OVER = b"\0"  # the watcher is to end
PATIENCE = 2.0  # seconds for that
NAME = "ringcomm-flight"  # the watcher's thread
WRITES = 60.0  # seconds, if torch is writing its own records: it gives up before
KEPT, KEPT_FAILED = 8, 64  # files of groups that are gone when another group is made
JOBS, BYTES, SECONDS = 16, 64 << 20, 7 * 86400  # in the temporary folder, of jobs that are gone

_lock, _files_lock = threading.Lock(), threading.Lock()
_watcher: tuple[int, threading.Thread] | None = None  # the pipe's end that is written
_writing = False  # torch's records
_told: list[bool] = []
_files: list[Path] = []  # for live groups
_left: list[Path] = []  # for groups that were destroyed
_failed: list[Path] = []  # for groups that had failed before
_numbers = itertools.count()
_said: list[bool] = []  # that there can be no files


def _forget() -> None:
    """Begin anew in a forked child: the files and threads are its parent's, which held the lock."""
    global _lock, _files_lock, _watcher
    _lock, _files_lock, _watcher = threading.Lock(), threading.Lock(), None
    for kept in (_told, _files, _left, _failed, _said):
        kept.clear()


os.register_at_fork(after_in_child=_forget)


def temporary_folder(job: str) -> Path:
    """Return a folder for the job among temporary files. Raises OSError, and ValueError."""
    # Its launcher tells a job of this host from others of the same name.
    return own_folder() / f"{job.replace('/', '-')}-{os.getppid()}"


def own_folder() -> Path:
    """Make this user's folder among temporary files. Raises OSError, and ValueError."""
    own = temporary_folders()
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    if own.is_symlink() or own.stat().st_uid != os.getuid():
        raise ValueError(f"{own} is somebody else's: set RINGCOMM_TRACE to a folder of yours")
    return own


def dump(folder: str | os.PathLike[str] | None = None, stacks: bytes = b"") -> Path | None:
    """Write the flight records of this rank, of all its groups, and return the folder.

    `folder`: RINGCOMM_TRACE, or where that is not set or cannot be written one among the temporary
    files. It gets a file `rank_N`, which PyTorch's `torchfrtrace` reads as well, and one for each
    group. `stacks`: a text for a file beside them. None: this rank has no group. Raises OSError,
    and ValueError for RINGCOMM_TRACE=off without a folder. Any thread may call it, also while
    another one hangs.
    """
    rings = load_library().flight_rings()
    if not rings:
        return None
    lines = program_lines.text()
    groups = [read_ring(ring, lines=lines.splitlines()) for ring in rings]
    named = folder if folder is not None else setting("trace")
    if named == "off" and folder is None:
        raise ValueError("RINGCOMM_TRACE=off: name a folder for the flight records")
    if not _lock.acquire(timeout=PATIENCE):
        raise TimeoutError("another thread writes flight records, and has not come to an end")
    try:
        if named:
            try:
                return dump_to(Path(named), rings, groups, lines, stacks)
            except OSError:
                if folder is not None:
                    raise
        place = temporary_folder(groups[0].job)
        is_new = not place.exists()
        dump_to(place, rings, groups, lines, stacks)
        if is_new:
            clean_up(place.parent, place)
    finally:
        _lock.release()
    return place


def dump_to(
    place: Path, rings: list[bytes], groups: list[GroupRecord], lines: str, stacks: bytes
) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    rank = max(groups, key=lambda group: group.size).global_rank
    name = f"rank{rank}-{os.getpid()}"
    there = there_in(place)
    end = processes.written(processes.this_process(snapshot=True))
    now = time.time_ns().to_bytes(8, "little")
    for number, (ring, group) in enumerate(zip(rings, groups, strict=True)):
        if (group.group, group.meeting, group.device) not in there:
            # Files that are written as the job runs have no "m" in their names.
            seen = ring[:SEEN_AT] + now + ring[SEEN_AT + 8 :]
            write(place / f"{name}-m{number}.ring", seen + end)
    if lines and not program_lines.are_in(place):
        write(place / f"{name}.lines", lines.encode(errors="backslashreplace"))
    if stacks:
        write(place / f"{name}.stacks", stacks)
    schema = torch_format.to_flight_recorder(groups)
    write(place / f"rank_{rank}", pickle.dumps(schema))
    return place


def last_operations(rings: list[bytes]) -> list[dict[str, Any]]:
    """Return what the rings of one group hold, in the order of the calls."""
    now = time.monotonic_ns()
    wall = time.time()
    calls = [call for ring in rings for call in read_ring(ring).operations]
    entries = []
    for call in sorted(calls, key=lambda call: call.called_ns or 0):
        began = call.began_ns or call.called_ns or now
        entries.append(
            {
                "operation": text_of(call),
                "sequence": call.sequence,
                "state": call.state,
                "algorithm": call.algorithm,
                "began": wall - (now - began) * 1e-9,
                "seconds": ((call.ended_ns or now) - began) * 1e-9,
                "waited": call.waited_ns * 1e-9,
            }
        )
    return entries


def text_of(operation: Operation) -> str:
    """Return "all_reduce float32[10] SUM", or "send float32[5] tag 7 to rank 1"."""
    words = f"{operation.collective} {operation.arguments}".rstrip()
    if not operation.is_message:
        return words
    peer = "any rank" if operation.root is None else f"rank {operation.root}"
    way = "to" if operation.collective == "send" else "from"
    if operation.kind == "put":
        return f"put {operation.arguments} into window {operation.window} of {peer}"
    if operation.window is not None:
        return f"{operation.name} {way} {peer}"
    return f"{words} tag {operation.splits} {way} {peer}"


def write(path: Path, data: bytes) -> None:
    """Write a file as a whole: readers never see half of it."""
    if path.exists() and not path.is_file():  # a device of the host's, as /dev/null
        raise FileExistsError(f"{path} is no regular file")
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_bytes(data)
        half.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            half.unlink()  # its blocks may be the last of the disk
        raise


def end(error: str) -> None:
    """End as the program does; dump if an error ends it. An ordinary one says nothing of that."""
    stop()
    if not error:
        return
    has_failed = any(numbers["failure"] for numbers in stats.every())
    dump_after(f"the program ends with {error}", says=has_failed, main=traceback_of_the_end())


def traceback_of_the_end() -> str:
    """Return where the exception that ends the program was raised: nothing runs there any more."""
    return "".join(traceback.format_tb(getattr(sys, "last_traceback", None)))


def dump_after(event: str, *, asked: bool = False, says: bool = True, main: str = "") -> None:
    """Dump because of an event, if there is a place for it; the program goes on in any case.

    `says`: a line in the log says where, once, and each time where somebody `asked`. `main`: the
    stack to write for the main thread, else where it is now.
    """
    if setting("trace") == "off":
        return
    try:
        place = dump(stacks=stacks_of_threads(main))
    except Exception as error:  # noqa: BLE001  another error is on its way to the user
        say(f"WARNING: flight records could not be written: {error}")
        return
    if place is not None and says and (asked or not _told):
        _told.append(True)
        say(f"WARNING: {event}: wrote flight records: run `ringcomm trace {place}`")


def watch(library: Any, rank: int) -> None:
    """Begin to write flight records at failures and at SIGUSR2; once a process.

    `rank` is the global one. Where this cannot be, a line says so, and the program goes on.
    """
    global _watcher
    folder = setting("trace")
    off = folder == "off"
    if _watcher is not None or (off and not library.calls_hooks):
        return
    try:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # no descriptors: the group itself is about to say so
        return
    if folder and not off:
        program_lines.keep_in(Path(folder), f"rank{rank}-{os.getpid()}")
    thread = threading.Thread(target=listen, args=(reading, rank), name=NAME, daemon=True)
    try:
        thread.start()
        if not off and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
            # Its handler writes at once, also while the main thread waits in the library, where one
            # of Python's would not run. The stacks of other threads it could not read safely.
            faulthandler.register(signal.SIGUSR2, file=writing, all_threads=False)
    except (RuntimeError, OSError) as error:  # no more threads
        say(f"WARNING: flight records are not written at failures: {error}")
        return
    _watcher = (writing, thread)
    library.tell_failures_to(writing)


def stop() -> None:
    """End the watcher: it must not come back from the library when Python is gone."""
    global _watcher
    if _watcher is None:
        return
    pipe, thread = _watcher
    _watcher = None
    with contextlib.suppress(OSError):  # full: it is reading
        os.write(pipe, OVER)
    thread.join(PATIENCE)


def await_torch() -> None:
    """Wait for the watcher while torch writes its own records, once all groups are closed."""
    for thread in threading.enumerate():
        if _writing and thread.name == NAME:
            thread.join(WRITES)


def listen(pipe: int, rank: int) -> None:
    """Look at the pipe, and at the groups, until the program ends; report the first error."""
    watcher = _Watcher(load_library(), rank)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    told = b""
    while OVER not in told:
        told = take(pipe, poll) if poll.poll(LOOK_EVERY * 1e3) else b""
        with watcher.saying("flight records"):
            watcher.hear(told) if told else watcher.look()


class _Watcher:
    """The work of the watching thread at each turn."""

    def __init__(self, library: Any, rank: int) -> None:
        self.library, self.rank, self.asked, self.due = library, rank, 0, 0.0
        self.stragglers, self.metrics = stragglers.Stragglers(), setting("metrics")
        self.off = setting("trace") == "off"  # then it serves torch's hooks alone
        self.folder = "" if self.off else setting("trace")
        self.hang_due = time.monotonic() + STILL
        self.hangs: set[tuple[int, bool, int]] = set()  # operations that were told
        self.places_due = time.monotonic() + STILL
        self.places: collections.deque[str] = collections.deque(maxlen=int(60 / LOOK_EVERY))
        self.said: set[str] = set()

    @contextlib.contextmanager
    def saying(self, what: str) -> Iterator[None]:
        """Say once what goes wrong: a program does not end because of its records."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            text = f"{what}: {type(error).__name__}: {error}"
            if text not in self.said:
                self.said.add(text)
                say(f"WARNING: {text}")

    def hear(self, told: bytes) -> None:
        """Dump because of what the pipe has told."""
        asked = bool(told.strip(FAILED + OVER))
        if asked:
            dump_after("SIGUSR2", asked=True)
        failed = FAILED in told and (not is_elastic() or bool(self.folder))
        if failed:
            self.note_writing()
            dump_after("a group has failed", says=not is_elastic())
        if (asked or failed) and not self.off:
            self.ask()
        if failed:
            self.tell_torch()

    def tell_torch(self) -> None:
        """Have torch's flight recorder write its file, too; from torch 2.15 on it asks for that."""
        global _writing
        try:
            self.library.tell_failures()
        finally:
            _writing = False

    def note_writing(self) -> None:
        global _writing
        _writing = bool(self.library.calls_hooks)

    def ask(self) -> None:
        """Ask all ranks for their records; that this one has asked is nothing new to it."""
        self.library.ask_for_records()
        self.asked = int(self.library.look_at_groups())

    def look(self) -> None:
        """Look at the groups, and at what their peers have asked for."""
        beat()
        if self.metrics:
            with self.saying(f"RINGCOMM_METRICS={self.metrics}"):
                write_metrics(Path(self.metrics), self.rank)
        if not is_elastic():  # such a world hears by itself
            times = int(self.library.look_at_groups())
            before, self.asked = self.asked, times
            if times > before:
                self.note_writing()
                dump_after("another rank has failed, or has waited for long")
                self.tell_torch()
        if self.off:
            return
        if time.monotonic() >= self.hang_due and (not is_elastic() or self.folder):
            self.hang_due = time.monotonic() + HANG_EVERY
            self.look_for_a_hang()
        if self.folder and (place := program_lines.main_thread_at()):
            self.places.append(place)
        if self.folder and time.monotonic() >= self.places_due:
            self.places_due = time.monotonic() + STILL
            self.keep_places()
        if time.monotonic() >= self.due:
            self.due = time.monotonic() + stragglers.EVERY
            self.stragglers.look(self.library.flight_rings(), time.monotonic())

    def look_for_a_hang(self) -> None:
        """Write records, and have all ranks write theirs, if a collective has waited for long.

        Then `ringcomm trace` can tell why while the job hangs. Messages may wait as they like.
        """
        before = time.monotonic_ns() - int(STILL * 1e9)
        hangs = {
            (record.meeting, record.device, operation.number)
            for ring in self.library.flight_rings()
            for record in [read_ring(ring, newest=HANGING)]
            for operation in record.operations
            if not (operation.is_done or operation.is_message or record.failure)
            and (operation.called_ns or before) < before
        }
        if hangs - self.hangs:
            self.hang_due = time.monotonic() + HANG_AGAIN
            dump_after("a collective hangs", says=False)
            self.ask()
        self.hangs = hangs

    def keep_places(self) -> None:
        """Write where the program is between its calls, so that trace can tell why it is slow."""
        lines = [line for line, _ in collections.Counter(self.places).most_common()]
        write(self.beside("often"), "\n".join(lines).encode(errors="replace"))

    def beside(self, suffix: str) -> Path:
        return Path(self.folder) / f"rank{self.rank}-{os.getpid()}.{suffix}"


def stacks_of_threads(main: str = "") -> bytes:
    """Return Python's stacks of all threads but this one, each as it is when it is looked at.

    `main`: that of the main thread, which is at the program's end.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = [f"thread MainThread:\n{main}"] if main else []
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            lines = traceback.format_stack(frame)
            texts.append(f"thread {names.get(number, number)}:\n{''.join(lines)}")
    return "\n".join(texts).encode(errors="replace")


def write_metrics(path: Path, rank: int) -> None:
    """Write the metrics. Raises OSError."""
    write(path.with_name(path.name.replace("%r", str(rank))), stats.metrics().encode())


def is_elastic() -> bool:
    """Tell whether failures are a part of this program's life."""
    return "ringcomm.elastic.world" in sys.modules


def take(pipe: int, poll: select.poll) -> bytes:
    """Read what comes until it is quiet, or over."""
    told = b""
    while len(told) < MOST and not told.endswith(OVER) and poll.poll(QUIET * 1e3):
        with contextlib.suppress(BlockingIOError):
            told += os.read(pipe, 1 << 16)
    return told


# ---- the files in which records lie while a job runs


def make_file(rank: int, size: int) -> int:
    """Return the descriptor of a new file of so many bytes, or -1. The library calls this.

    A setting for traces never ends a job: where there can be no file the records stay in memory,
    and one line says so.
    """
    folder = setting("trace")
    if not folder or folder == "off":
        return -1
    try:
        with _files_lock:
            return make_in(Path(folder), rank, size)
    except Exception as error:  # noqa: BLE001  a program does not end because of its records
        if not _said:
            _said.append(True)
            why = getattr(error, "strerror", None) or error
            say(f"WARNING: RINGCOMM_TRACE={folder}: {why}: flight records are kept in memory")
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
    groups = set()
    with _files_lock:
        for path in (*_files, *_left, *_failed):
            head = head_of(path) if path.parent.resolve() == folder.resolve() else None
            if head is not None:
                about = header_of(head)
                groups.add((about["group"], about["meeting"], about["device"]))
    return groups


def beat() -> None:
    """Note in one of the files that this process lives."""
    with _files_lock:
        for path in reversed(_files):
            with contextlib.suppress(OSError):
                file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.pwrite(file, struct.pack("<q", time.time_ns()), SEEN_AT)
                    return
                finally:
                    os.close(file)


def clean_up(jobs: Path, mine: Path) -> None:
    """Remove folders of jobs that are gone: where there are many or large ones, and old ones.

    A folder stays while one of its processes lives. Where that cannot be known, because it is
    another container's or of another start of this host, it stays for a week. One of another host
    stays.
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
    writers = [process_in(path) for path in folder.glob("*.ring")]
    if not writers or any(host != os.uname().nodename for host, _ in writers):
        return False
    lives = {processes.life_of(process) for _, process in writers}
    return lives == {processes.Life.GONE} or (old and processes.Life.LIVES not in lives)
