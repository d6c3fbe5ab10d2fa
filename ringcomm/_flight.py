"""Flight records: what this rank did in its groups, written for those who ask afterwards.

The library keeps them in memory always, and in files of the folder RINGCOMM_TRACE as they are made.
This module writes them where something has gone wrong: when a group fails, at an exit by an
exception, at SIGUSR2, and when the program asks. `ringcomm trace` reads them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringcomm import _autoload, _lines, _stats, _stragglers
from ringcomm._options import of_process, warn

if TYPE_CHECKING:
    from ringcomm.tools.records import Operation

QUIET = 0.05  # seconds: what is told within belongs together
LOOK_EVERY = 1.0  # seconds: at other ranks, and for metrics
MOST = 1 << 20  # bytes of the pipe that are read at once
# Words of the pipe, which no text of faulthandler has.
FAILED = b"\1"  # the library's
OVER = b"\0"  # the watcher is to end
PATIENCE = 2.0  # seconds for that

_lock = threading.Lock()
_watcher: tuple[int, threading.Thread] | None = None  # the pipe's end that is written
_told: list[bool] = []


def _forget() -> None:
    """Begin anew in a forked child: threads of its parent may have held the lock."""
    global _lock, _watcher
    _lock, _watcher = threading.Lock(), None
    _told.clear()


os.register_at_fork(after_in_child=_forget)


def folder_of_job(job: str) -> Path:
    """Return RINGCOMM_TRACE, or a folder for the job among temporary files.

    Raises ValueError for RINGCOMM_TRACE=off.
    """
    named = of_process("trace")
    if named == "off":
        raise ValueError("RINGCOMM_TRACE=off: name a folder for the flight records")
    if named:
        return Path(named)
    # Its launcher tells a job of this host from others of the same name.
    own = Path(os.environ.get("TMPDIR") or tempfile.gettempdir()) / f"ringcomm-{os.getuid()}"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    if own.is_symlink() or own.stat().st_uid != os.getuid():
        raise ValueError(f"{own} is somebody else's: set RINGCOMM_TRACE to a folder of yours")
    return own / f"{job.replace('/', '-')}-{os.getppid()}"


def dump(folder: str | os.PathLike[str] | None = None, stacks: bytes = b"") -> Path | None:
    """Write the flight records of this rank, of all its groups, and return the folder.

    `folder`: RINGCOMM_TRACE, or where that is not set one among the temporary files. It gets a file
    `rank_N`, which PyTorch's `torchfrtrace` reads as well, and one for each group. `stacks`: a text
    for a file beside them. None: this rank has no group. Raises OSError, and ValueError for
    RINGCOMM_TRACE=off without a folder. Any thread may call it, also while another one hangs.
    """
    from ringcomm.tools import flight_recorder, records

    rings = _autoload.load_library().flight_rings()
    if not rings:
        return None
    with _lock:
        lines = _lines.text()
        groups = [records.read_ring(ring, lines=lines.splitlines()) for ring in rings]
        whole = max(groups, key=lambda group: group.size)
        place = Path(folder) if folder is not None else folder_of_job(whole.job)
        place.mkdir(parents=True, exist_ok=True)
        name = f"rank{whole.global_rank}-{os.getpid()}"
        live = of_process("trace")
        if not live or place.resolve() != Path(live).resolve():  # there they are anyway
            for number, ring in enumerate(rings):
                write(place / f"{name}-{number}.ring", ring)
            if lines:
                write(place / f"{name}.lines", lines.encode(errors="backslashreplace"))
        if stacks:
            write(place / f"{name}.stacks", stacks)
        schema = flight_recorder.to_flight_recorder(groups)
        write(place / f"rank_{whole.global_rank}", pickle.dumps(schema))
    return place


def last_operations(rings: list[bytes]) -> list[dict[str, Any]]:
    """Return what the rings of one group hold, in the order of the calls."""
    from ringcomm.tools import records

    now = time.monotonic_ns()
    wall = time.time()
    found = [each for ring in rings for each in records.read_ring(ring).operations]
    entries = []
    for each in sorted(found, key=lambda each: each.called_ns or 0):
        began = each.began_ns or each.called_ns or now
        entries.append(
            {
                "operation": text_of(each),
                "sequence": each.sequence,
                "state": each.state,
                "algorithm": each.algorithm,
                "began": wall - (now - began) * 1e-9,
                "seconds": ((each.ended_ns or now) - began) * 1e-9,
                "waited": each.waited_ns * 1e-9,
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
    return f"{words} tag {operation.splits} {way} {peer}"


def write(path: Path, data: bytes) -> None:
    """Write a file as a whole: nobody sees half of it."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_bytes(data)
    half.replace(path)


def dump_after(event: str, stacks: bytes = b"") -> None:
    """Dump because of an event, if there is a place for it; the program goes on in any case."""
    if of_process("trace") == "off":
        return
    try:
        place = dump(stacks=stacks)
    except Exception as error:  # noqa: BLE001  another error is on its way to the user
        warn(f"flight records could not be written: {error}")
        return
    if place is not None and (stacks or not _told):
        _told.append(True)
        warn(f"{event}: wrote flight records: run `ringcomm trace {place}`")


def watch(library: Any, rank: int) -> None:
    """Begin to write flight records at failures and at SIGUSR2; once a process.

    `rank` is the global one. Where the folder of RINGCOMM_TRACE is no folder, the library says so.
    """
    global _watcher
    folder = of_process("trace")
    if _watcher is not None or folder == "off":
        return
    try:
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # no descriptors: the group itself is about to say so
        return
    if folder:
        _lines.keep_in(Path(folder), f"rank{rank}-{os.getpid()}")
    library.tell_failures_to(writing)
    if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        # Its handler writes at once, also while the main thread waits in the library, where one of
        # Python's would not run. The stacks of other threads it could not read safely.
        faulthandler.register(signal.SIGUSR2, file=writing, all_threads=False)
    thread = threading.Thread(
        target=listen, args=(reading, rank), name="ringcomm-flight", daemon=True
    )
    _watcher = (writing, thread)
    thread.start()


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


def listen(pipe: int, rank: int) -> None:
    """Look at the pipe, and at the groups, until the program ends; what goes wrong is said once."""
    library = _autoload.load_library()
    watcher = _Watcher(library, rank)
    poll, said = select.poll(), set()
    poll.register(pipe, select.POLLIN)
    told = b""
    while OVER not in told:
        told = take(pipe, poll) if poll.poll(LOOK_EVERY * 1e3) else b""
        try:
            watcher.hear(told) if told else watcher.look()
        except Exception as error:  # noqa: BLE001  a program does not end because of its records
            text = f"flight records: {type(error).__name__}: {error}"
            if text not in said:
                said.add(text)
                warn(text)


class _Watcher:
    """What the watching thread does at each turn."""

    def __init__(self, library: Any, rank: int) -> None:
        self.library, self.rank, self.asked, self.due = library, rank, 0, 0.0
        self.stragglers, self.metrics = _stragglers.Stragglers(), of_process("metrics")

    def hear(self, told: bytes) -> None:
        """Dump because of what the pipe has told."""
        if told.strip(FAILED + OVER):
            dump_after("SIGUSR2", stacks_of_threads())
        if FAILED in told and (not is_elastic() or of_process("trace")):
            dump_after("a group has failed")
            self.library.ask_for_records()
            self.asked = int(self.library.look_at_groups())

    def look(self) -> None:
        """Look at the groups, and at what their peers have asked for."""
        if self.metrics:
            write_metrics(Path(self.metrics), self.rank)
        if not is_elastic():  # such a world hears by itself
            times = int(self.library.look_at_groups())
            before, self.asked = self.asked, times
            if times > before:
                dump_after("a group of another rank has failed")
        if time.monotonic() >= self.due:
            self.due = time.monotonic() + _stragglers.EVERY
            self.stragglers.look(self.library.flight_rings(), time.monotonic())


def stacks_of_threads() -> bytes:
    """Return Python's stacks of all threads but this one, each as it is when it is looked at."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for number, frame in sys._current_frames().items():
        if number != threading.get_ident():
            lines = traceback.format_stack(frame)
            texts.append(f"thread {names.get(number, number)}:\n{''.join(lines)}")
    return "\n".join(texts).encode(errors="replace")


def write_metrics(path: Path, rank: int) -> None:
    """Write the metrics; a missing folder or a full disk must not end the program."""
    with contextlib.suppress(OSError):
        write(path.with_name(path.name.replace("%r", str(rank))), _stats.metrics().encode())


def is_elastic() -> bool:
    """Tell whether failures are a part of this program's life."""
    world = sys.modules.get("ringcomm.elastic.world")
    return world is not None


def take(pipe: int, poll: select.poll) -> bytes:
    """Read what comes until it is quiet, or over."""
    told = b""
    while len(told) < MOST and not told.endswith(OVER) and poll.poll(QUIET * 1e3):
        with contextlib.suppress(BlockingIOError):
            told += os.read(pipe, 1 << 16)
    return told
