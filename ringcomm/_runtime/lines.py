"""Lines of the program: where a thread is, and which of them call collectives.

With RINGCOMM_TRACE_LINES=1 the library asks for the number of each caller. The numbers are those of
lines in a text file beside the records, which is written as lines are first seen: it is there, too,
when the process is killed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

OURS = str(Path(__file__).parents[1]) + os.sep

LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python3|/ringcomm/(_|elastic/|tools/)|^<frozen"
)
COLLECTIVE = re.compile(r"/torch/distributed/")

_lock = threading.Lock()
_numbers: dict[tuple[str, int], int] = {}
_lines: list[str] = []
_file: list[Path] = []


def _forget() -> None:
    """Begin anew in a forked child: its lines are its own, and a thread may have held the lock."""
    global _lock
    _lock = threading.Lock()
    for kept in (_numbers, _lines, _file):
        kept.clear()


os.register_at_fork(after_in_child=_forget)


def frame_outside(folders: tuple[str, ...] | str) -> FrameType | None:
    """Return the innermost frame of a file outside of the folders."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return frame


def innermost(frames: Iterable[tuple[str, object, str]]) -> str:
    """Return "train.py:42 in load", the last of the frames that is of no library; "" for none.

    A frame is a file, a line and a function. If all are of libraries, the last one is told.
    """
    some = list(frames)
    own = [frame for frame in some if not LIBRARY.search(frame[0])]
    if not some:
        return ""
    path, line, function = (own or some)[-1]
    return f"{path.rpartition('/')[2]}:{line} in {function}"


def raised_at(trace: TracebackType | None) -> str:
    """Return the line of the program that raised an exception; "" where there is none."""
    frames = traceback.walk_tb(trace)
    return innermost((f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames)


def main_thread_at() -> str:
    """Return the line that the main thread is at; "" while it calls a collective."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or COLLECTIVE.search(frame.f_code.co_filename):
        return ""
    frames = [
        (f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame)
    ]
    return innermost(reversed(frames))


@functools.cache
def libraries() -> tuple[str, ...]:
    """Return the folders in which no line of the program is: ringcomm's and torch's."""
    torch = importlib.util.find_spec("torch")
    return (OURS, str(Path(torch.origin).parent) + os.sep) if torch and torch.origin else (OURS,)


def number_of_caller() -> int:
    """Return the number of the line that calls, from 1 on; 0: no Python calls. Never raises."""
    frame = frame_outside(libraries())
    if frame is None:
        return 0
    place = (frame.f_code.co_filename, frame.f_lineno)
    return _numbers.get(place) or add(place, frame.f_code.co_name)


def add(place: tuple[str, int], function: str) -> int:
    with _lock:
        if place not in _numbers:
            line = f"{place[0]}:{place[1]} in {function}"
            _lines.append(line)
            _numbers[place] = len(_lines)
            if _file:
                append([line])
        return _numbers[place]


def keep_in(folder: Path, name: str) -> None:
    """Keep the lines in a file of that folder from now on."""
    with _lock:
        if not _file:
            _file.append(folder / f"{name}.lines")
            append(_lines)


def are_in(folder: Path) -> bool:
    with _lock:
        return bool(_file) and _file[0].exists() and _file[0].parent.resolve() == folder.resolve()


def append(lines: list[str]) -> None:
    """Append; a full disk must not end the program. Then nothing follows: a line is its number."""
    try:
        _file[0].parent.mkdir(parents=True, exist_ok=True)
        with _file[0].open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(f"{line}\n" for line in lines))
    except OSError:
        _file.clear()


def text() -> str:
    with _lock:
        return "".join(f"{line}\n" for line in _lines)
