"""Checkpoints of an elastic world, for the loss of all its ranks at once.

A thread of one rank copies the state to host memory (snapshot.py), and writes the copy as a folder
of torch.distributed.checkpoint (DCP). The folder gets its name by one rename, after all of it is on
the disk. Its manifest has the size and the hash of each file, so that damage is found.

A folder `step-000000500` holds `__0_0.distcp` and `.metadata`, as any DCP reader expects them, and
`manifest.json`. Tensors have the names that DCP gives them. All other values are one entry of
bytes, `ringcomm.plain`: the state with an empty tensor in the place of each tensor.

What is trusted: no file may run code here. DCP's `.metadata` is a pickle for other readers, and is
never unpickled: the manifest says where each entry lies. Entries are read with `weights_only=True`.
The hashes find damage, not forgery: the one who may write the files decides the numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Set
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from ringcomm._runtime.process import say
from ringcomm.elastic import journal
from ringcomm.elastic.shards import part_of
from ringcomm.elastic.snapshot import Snapshot
from ringcomm.elastic.stats import Checkpoint
from ringcomm.elastic.transfer import PLAIN as PLAIN_TYPES

FORMAT = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"  # DCP's name
DATA = "__0_0.distcp"  # this, too
PLAIN = "ringcomm.plain"
NAME = re.compile(r"step-\d{9,}(\.\d+)?")
HIDDEN = re.compile(r"\.writing-(\w+)-(\d+)-\w+")  # host, process
HOST = re.sub(r"\W", "_", socket.gethostname())
ABANDONED_SECONDS = 3600.0  # without a change, by the clock of the file system

Keys: TypeAlias = "tuple[str | int, ...]"


class Found(NamedTuple):
    """A whole checkpoint: its folder, the step after which it was made, and `save`'s `about`."""

    path: Path
    step: int
    about: dict[str, Any]


class Checkpoints:
    """Writes checkpoints into one folder and finds the newest whole one; one rank writes at a time.

    `every` is a number of steps or a time. The `keep` newest whole checkpoints stay; while one is
    written there are `keep` + 1. Each warning is one sentence, given to `log`, also by the thread.
    A tensor's copy in host memory is freed when it is written: none stays between saves.
    Raises ValueError where `every` or `keep` is less than one.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | timedelta,
        keep: int = 2,
        log: Callable[[str], None] = lambda text: say(f"WARNING: {text}"),
    ) -> None:
        if (every <= timedelta(0)) if isinstance(every, timedelta) else (every < 1):
            raise ValueError(f"every={every}: give a number of steps, at least 1, or a time")
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint has to stay")
        self.directory = Path(directory).absolute()
        self._every, self._keep, self._log = every, keep, log
        self._since: float | None = None  # start of the current period
        self._thread: threading.Thread | None = None
        self._snapshot: Snapshot | None = None  # the one that it writes
        self._error = ""  # from the last write; read after the thread's end
        self.known: Checkpoint | None = None  # the newest that was written or loaded here
        self.failures = 0
        self._journal = journal.Journal(journal.CHECKPOINTS)

    def due(self, step: int, now: float) -> bool:
        """Tell whether a checkpoint is to be made after `step`, at `now` (monotonic seconds).

        A time for `every` runs from the first call, and anew from each that answers True.
        """
        if not isinstance(self._every, timedelta):
            return step > 0 and step % self._every == 0
        self._since = now if self._since is None else self._since
        over = now - self._since >= self._every.total_seconds()
        self._since = now if over else self._since
        return over

    def save(
        self,
        step: int,
        state: dict[str, Any],
        about: dict[str, Any],
        later: Set[int] = frozenset(),
    ) -> None:
        """Copy `state`, the results of `state_dict`s, and have a thread write it.

        Tensors in memory of which the address is in `later` are copied by the thread, too: nothing
        may change them before `secure`.
        `state` holds dense tensors, in dicts, lists and tuples, and what `weights_only` can read.
        `about` is what JSON takes. While the thread still writes a former checkpoint this one is
        left out, and a line says so: training waits for no disk. To have it for certain, call
        `finish` first. A write that fails is logged only. The end of the process waits for it.
        Raises TypeError or ValueError for a state that cannot be saved, naming the value.
        """
        if self._thread is not None and self._thread.is_alive():
            self._log(f"checkpoint of step {step} is left out: the last one is still being written")
            return
        head = {"format": FORMAT, "torch": str(torch.__version__), "step": step, "about": about}
        head = json.loads(json.dumps(head))  # a copy
        paths, tensors, plain = _split(state)
        snapshot, self._error = Snapshot(tensors, later), ""
        self._thread = threading.Thread(target=self._run, args=(head, paths, plain, snapshot))
        self._thread.start()
        self._snapshot = snapshot

    def secure(self) -> None:
        """Wait until all that was to be saved may change."""
        if self._snapshot is not None:
            self._snapshot.secure()
            self._snapshot = None

    def finish(self) -> None:
        """Wait for the write under way; raises RuntimeError, one sentence, if it failed."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, ""
        if error:
            raise RuntimeError(error)

    def latest_step(self, most: int | None = None) -> int:
        """Return the step of the newest checkpoint, whose files are not read yet; -1: none.

        `most` leaves out those of later steps.
        """
        paths = self._until(most)
        return _order(paths[0])[0] if paths else -1

    def about(self, step: int) -> dict[str, Any]:
        """Return what `save` was told about the newest checkpoint up to `step`; {}: damaged."""
        with contextlib.suppress(_DamageError, IndexError):
            manifest = _check(self._until(step)[0], hashes=False)
            return dict(manifest["about"])
        return {}

    def _until(self, most: int | None) -> list[Path]:
        paths = _checkpoints(self.directory)
        return [path for path in paths if most is None or _order(path)[0] <= most]

    def newest(self, most: int | None = None) -> Found | None:
        """Return the newest whole checkpoint, of step `most` at most; None if there is none at all.

        Reads and hashes all its bytes. One that is damaged is passed over, with a line that names
        the file. Raises RuntimeError where all are damaged: to begin anew would lose the work.
        """
        paths = self._until(most)
        for path in paths:
            try:
                manifest = _check(path, hashes=True)
            except _DamageError as damage:
                self._log(f"checkpoint {path} is passed over: {damage}")
            else:
                return Found(path, manifest["step"], manifest["about"])
        if paths:
            what = f"no checkpoint in {self.directory} is whole"
            raise RuntimeError(f"{what}: put one back, or name another folder to begin anew")
        return None

    def load(self, checkpoint: Found, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state that was saved, in new CPU tensors, for `load_state_dict`s.

        `state` is the present one, and says by its keys what has to be there; it is not changed.
        Raises ValueError if the checkpoint lacks a key; RuntimeError if a file cannot be read.
        """
        try:
            entries = _check(checkpoint.path, hashes=False)["entries"]
            values = {name: _entry(checkpoint.path, place) for name, place in entries.items()}
        except (_DamageError, OSError, RuntimeError, pickle.UnpicklingError) as error:
            what = f"checkpoint {checkpoint.path} cannot be read"
            raise RuntimeError(f"{what}: {_reason(error)}") from error
        self._know(checkpoint.path, checkpoint.step)
        plain: dict[str, Any] = values.pop(PLAIN)
        missing = [str(key) for key in state if key not in plain]
        if missing:
            raise ValueError(
                f"checkpoint {checkpoint.path} lacks {', '.join(missing)} of the state"
            )
        return _swap(plain, (), lambda path, _: values[_name(path)])

    def _run(
        self, head: dict[str, Any], paths: dict[str, Keys], plain: Any, snapshot: Snapshot
    ) -> None:
        folder, began = _hidden(self.directory), time.monotonic()
        told = {"step": head["step"], "folder": str(self.directory), "began": began}
        try:
            entries = {PLAIN: plain, **snapshot.finish()}
            self.directory.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            if journal.finds_disk_full():
                (folder / DATA).symlink_to("/dev/full")
            _remove_leftovers(self.directory, folder)
            _complete(folder, head, _write(folder, entries, paths))
            path = _publish(folder, head["step"])
        except Exception as error:  # noqa: BLE001  training goes on without this checkpoint
            shutil.rmtree(folder, ignore_errors=True)
            what = f"checkpoint of step {head['step']} could not be written"
            self._error = f"{what} to {self.directory}: {_reason(error)}"
            self.failures += 1
            self._journal("unsaved", why=_reason(error), **told)
            self._log(f"{self._error}; training goes on, and the next save tries anew")
            return
        self._know(path, head["step"])
        self._journal("checkpoint", **told)
        try:
            _thin(path, self._keep)
        except OSError as error:
            self._log(f"old checkpoints in {self.directory} could not be removed: {error}")

    def _know(self, path: Path, step: int) -> None:
        with contextlib.suppress(OSError):  # another process has removed it
            self.known = {"step": step, "path": str(path), "at": path.stat().st_mtime}


def _swap(value: Any, path: Keys, other: Callable[[Keys, torch.Tensor], Any]) -> Any:
    """Copy the containers, with `other`'s answer in the place of each tensor."""
    kind = type(value)
    if kind in PLAIN_TYPES:
        return value
    if isinstance(value, torch.Tensor):
        return other(path, value)
    if kind in (list, tuple):
        if set(map(type, value)) <= PLAIN_TYPES:
            return value[:]
        return kind([_swap(item, (*path, i), other) for i, item in enumerate(value)])
    if kind not in (dict, OrderedDict) or not set(map(type, value)) <= PLAIN_TYPES:
        return _loadable(value, path)
    copy = kind((key, _swap(item, (*path, str(key)), other)) for key, item in value.items())
    if kind is OrderedDict:  # a module's has `_metadata`: the versions, for load_state_dict
        vars(copy).update(_swap(dict(vars(value)), path, other))
    return copy


def _loadable(value: Any, path: Keys) -> Any:
    """Copy a value of any other type, if it can be read again without running code."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        return torch.load(io.BytesIO(stream.getbuffer()), weights_only=True)
    except Exception as error:
        what = f"a checkpoint cannot hold {_name(path)}, a {type(value).__name__}"
        raise TypeError(f"{what}: give tensors and plain values in its state_dict") from error


def _split(state: dict[str, Any]) -> tuple[dict[str, Keys], dict[str, torch.Tensor], Any]:
    """Return the keys that lead to each tensor, the tensors, both by name, and the rest."""
    paths: dict[str, Keys] = {}
    tensors: dict[str, torch.Tensor] = {}
    place = torch.empty(0)

    def enter(path: Keys, tensor: torch.Tensor) -> torch.Tensor:
        name, tensor = _name(path), part_of(tensor)
        known = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
        if not known or tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(f"a checkpoint cannot hold {name}: it is not a whole, dense tensor")
        if name in tensors or name == PLAIN:
            raise ValueError(f"two entries of the state are named {name}: rename one of the keys")
        paths[name], tensors[name] = path, tensor.detach()
        return place

    return paths, tensors, _swap(state, (), enter)


def _name(path: Keys) -> str:
    return ".".join(map(str, path))  # DCP's rule


def _write(folder: Path, entries: dict[str, Any], paths: dict[str, Keys]) -> dict[str, Any]:
    """Write DCP's files by the calls of `dcp.save`; returns each entry's file, offset, length.

    `entries` is empty afterwards: each is taken out, and its memory freed, when it is written.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            del self.state_dict[write_item.index.fqn]
            return data

    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer = FileSystemWriter(folder, sync_files=False)  # `_complete` does
    writer.set_up_storage_writer(True)
    planner.set_up_planner(entries, writer.storage_meta(), True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).wait()
    metadata.planner_data = {PLAIN: (PLAIN,), **paths}  # how a reader nests the names again
    writer.finish(metadata, [results])
    places = {result.index.fqn: result.storage_data for result in results}
    return {name: [at.relative_path, at.offset, at.length] for name, at in places.items()}


def _complete(folder: Path, head: dict[str, Any], entries: dict[str, Any]) -> None:
    """Put all files on the disk, the manifest last."""
    files = {}
    for name in sorted({METADATA, *(file for file, _, _ in entries.values())}):
        _sync(folder / name)
        files[name] = {"bytes": (folder / name).stat().st_size, "blake2b": _hash(folder / name)}
    (folder / MANIFEST).write_bytes(_seal({**head, "files": files, "entries": entries}))
    _sync(folder / MANIFEST)
    _sync(folder)


def _publish(folder: Path, step: int) -> Path:
    """Give the folder its name; a number follows where another has it, say a damaged one."""
    path, attempt = folder.with_name(f"step-{step:09d}"), 0
    while path.exists():
        attempt += 1
        path = folder.with_name(f"step-{step:09d}.{attempt}")
    folder.rename(path)
    _sync(path.parent)
    return path


def _thin(new: Path, keep: int) -> None:
    """Remove all but the `keep` newest; a later step than that of `new` is damaged, and stays."""
    for path in [path for path in _checkpoints(new.parent) if _order(path) <= _order(new)]:
        with contextlib.suppress(_DamageError):
            keep -= bool(path == new or _check(path, hashes=False))
            if keep >= 0:
                continue
        shutil.rmtree(path.rename(_hidden(path.parent)))  # so no half of it keeps the name


def _remove_leftovers(directory: Path, own: Path) -> None:
    """Remove the folders that dead writers left; on another host, those that no longer change."""
    now = own.stat().st_mtime
    for folder in directory.iterdir():
        writer = HIDDEN.fullmatch(folder.name)
        if writer is None or folder == own:
            continue
        here, mine = writer[1] == HOST, writer[2] == str(os.getpid())
        with contextlib.suppress(OSError):  # it was removed meanwhile
            changed = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            dead = here and (mine or not Path("/proc", writer[2]).exists())
            if dead or now - changed > ABANDONED_SECONDS:
                shutil.rmtree(folder)


class _DamageError(Exception):
    """Says which file of a checkpoint is damaged, and how."""


def _check(path: Path, *, hashes: bool) -> dict[str, Any]:
    """Return the manifest; raises _DamageError if a length, or with `hashes` a byte, differs."""
    name = MANIFEST
    try:
        raw = (path / MANIFEST).read_bytes()
        manifest: dict[str, Any] = json.loads(raw)
        if _seal(manifest) != raw:
            raise ValueError
        if manifest["format"] != FORMAT:
            raise _DamageError(f"{MANIFEST} has format {manifest['format']}, not {FORMAT}")
        for name, file in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != file["bytes"]:
                raise _DamageError(f"{name} has {size} bytes, not {file['bytes']}")
            if hashes and _hash(path / name) != file["blake2b"]:
                raise ValueError
    except (ValueError, AttributeError):
        raise _DamageError(f"{name} has other bytes than were written") from None
    except OSError as error:
        raise _DamageError(f"{name} cannot be read ({error.strerror})") from None
    return manifest


def _seal(manifest: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest, with its own hash in it."""
    body = {key: value for key, value in manifest.items() if key != "blake2b"}
    digest = hashlib.blake2b(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "blake2b": digest}, sort_keys=True, indent=1).encode()


def _hash(path: Path) -> str:
    digest = hashlib.blake2b()
    with path.open("rb", buffering=0) as stream:
        while piece := stream.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _entry(path: Path, place: list[Any]) -> Any:
    file, offset, length = place
    with (path / file).open("rb") as stream:
        stream.seek(offset)
        return torch.load(io.BytesIO(stream.read(length)), weights_only=True)


def _checkpoints(directory: Path) -> list[Path]:
    """Return the folders with a checkpoint's name, the newest first."""
    inside = directory.iterdir() if directory.exists() else ()
    return sorted((path for path in inside if NAME.fullmatch(path.name)), key=_order, reverse=True)


def _order(path: Path) -> tuple[int, int]:
    step, _, attempt = path.name.removeprefix("step-").partition(".")
    return int(step), int(attempt or 0)


def _hidden(directory: Path) -> Path:
    return directory / f".writing-{HOST}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    """Return what happened in one line: the system's word for it where there is one."""
    inner: BaseException | None = error
    while inner is not None and not getattr(inner, "strerror", None):
        inner = inner.__context__
    return str(getattr(inner, "strerror", None) or error).partition("\n")[0] or repr(error)
