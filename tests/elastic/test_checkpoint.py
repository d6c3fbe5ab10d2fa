"""Checkpoints: bit-exact, readable by DCP, whole or not there, whatever ends the writer."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import weakref
from collections import Counter, OrderedDict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lab.limits import limit, seed
from ringcomm.elastic import checkpoint, snapshot
from ringcomm.elastic.checkpoint import MANIFEST, Checkpoints

FILES = ["__0_0.distcp", ".metadata", MANIFEST]
AGAIN = "training goes on, and the next save tries anew"

# Saves that end or fail at each of their calls of the file system in turn, or at any time.
PROGRAM = """
import errno, itertools, json, os, random, resource, signal, sys, time
from pathlib import Path
import torch.distributed.checkpoint
from ringcomm.elastic.checkpoint import Checkpoints

torch.set_num_threads(1)
os.fsync = lambda descriptor: call("os.fsync")  # no power is lost here
folder = Path(sys.argv[1])
mode, left = "", 0  # what happens, and after how many calls
def call(name, *_):
    global mode, left
    left -= name == "open" or name.startswith("os.")
    if mode and left < 0:
        happens, mode = mode, ""
        if happens == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, "No space left on device")
def save(where, step, length=50):
    lines = []
    checkpoints = Checkpoints(where, every=1, keep=1, log=lines.append)
    net = {str(i): torch.full((length,), float(step + i)) for i in range(3)}
    checkpoints.save(step, {"net": net, "step": step}, {"step": step})
    checkpoints._thread.join()
    return lines
def save_until(where, *what):
    global mode, left
    mode, left = what
    lines = save(where, 2)
    over, mode = bool(mode), ""
    return over, lines
def look(where):
    checkpoints = Checkpoints(where, every=1, log=print)
    loaded = checkpoints.load(found := checkpoints.newest(), {})
    same = all(bool((t == found.step + int(i)).all()) for i, t in loaded["net"].items())
    assert same and loaded["step"] == found.about["step"] == found.step
    return found.step, sum(path.name.startswith(".") for path in where.iterdir())
def each_call(mode):
    for calls in itertools.count():
        where, over, lines = folder / mode / str(calls), False, []
        save(where, 1)
        if mode == "failed":
            over, lines = save_until(where, mode, calls)
        else:
            child = os.fork() or os._exit(save_until(where, mode, calls)[0])
            over = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        yield *look(where), lines
        save(where, 3)
        assert look(where) == (3, 0) and len(list(where.iterdir())) == 1, list(where.iterdir())
        if over:
            return
def any_time(step=1):
    chance = random.Random(int(sys.argv[2]))
    save(folder / "all", step)
    for most in (0.15 * 1.3**turn for turn in range(12)):  # seconds, up to what slow machines need
        writer = os.fork() or [save(folder / "all", n, 300_000) for n in range(step, 9999)]
        time.sleep(chance.uniform(0.01, most))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        step, _ = look(folder / "all")
        yield step
sys.addaudithook(call)
done = {mode: list(each_call(mode)) for mode in ("killed", "failed")}
done["any time"], where = list(any_time()), folder / "killed" / "0"
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
print(json.dumps({**done, "too large": [*save(where, 4, 300_000), *look(where)]}))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("all")), str(seed())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def same(left: Any, other: Any) -> bool:
    """Whether all is the same: types, keys, each bit of each tensor."""
    if isinstance(left, torch.Tensor):
        flat = [tensor.detach().cpu().contiguous().view(-1) for tensor in (left, other)]
        alike = left.dtype == other.dtype and left.shape == other.shape
        return alike and (not left.numel() or torch.equal(*(f.view(torch.uint8) for f in flat)))
    if type(left) is not type(other):
        return False
    if isinstance(left, dict):
        kept = getattr(left, "_metadata", None) == getattr(other, "_metadata", None)
        return kept and list(left) == list(other) and all(same(left[k], other[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(other) and all(map(same, left, other))
    return bool(left == other or left != left)


def save(folder: Path, *steps: int, state: Any = None, keep: int = 2) -> list[str]:
    """Save checkpoints; returns the lines that were logged."""
    lines: list[str] = []
    checkpoints = Checkpoints(folder, every=1, keep=keep, log=lines.append)
    for step in steps:
        checkpoints.save(step, state or {"x": torch.full((100,), float(step))}, {"epoch": step})
        checkpoints.finish()
    return lines


def load(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    checkpoints = Checkpoints(folder, every=1)
    newest = checkpoints.newest() or pytest.fail("there is no checkpoint")
    return checkpoints.load(newest, state)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def training(device: str = "cpu") -> dict[str, Any]:
    layers = torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(0.3)
    net = torch.nn.Sequential(*layers).to(device)
    opt = torch.optim.AdamW(net.parameters(), lr=0.01)
    return {"net": net, "opt": opt, "sched": torch.optim.lr_scheduler.StepLR(opt, 2)}


def advance(parts: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train; returns the state."""
    for _ in range(steps):
        parts["opt"].zero_grad()
        data = torch.randn(8, 5).to(parts["net"][0].weight.device)
        parts["net"](data).square().mean().backward()
        parts["opt"].step()
        parts["sched"].step()
    rng = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    return {**{key: part.state_dict() for key, part in parts.items()}, "rng": rng}


@pytest.mark.parametrize("device", ["cpu", "cuda"][: 1 + torch.cuda.is_available()])
def test_training_goes_on_bit_for_bit(tmp_path: Path, device: str) -> None:
    steady, other = training(device), training(device)
    state = advance(steady, 3)
    save(tmp_path, 3, state=state)
    loaded = load(tmp_path, advance(other, 0))
    assert same(loaded, state)
    state = advance(steady, 2)
    for key, part in other.items():
        part.load_state_dict(loaded[key])
    torch.set_rng_state(loaded["rng"]["cpu"])
    assert same(advance(other, 2), state)


def test_values_of_all_kinds(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan"), -0.0, float("inf")])
    nan.view(torch.int32)[0] += 5  # another of the many
    state: dict[Any, Any] = {
        "scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3},
        "deck": {"queue": [[1, 2], [3], []], "returned": [], "next": 2**70},
        "tensors": [nan, [torch.tensor(3), 1.5, (torch.zeros(0, 4), None, "x")]],
        5: {7: {True: torch.arange(6).reshape(2, 3).t()}, "plain": (1, (2.0, [None])), None: b"\0"},
        "types": [torch.rand(3).to(torch.bfloat16), torch.half, torch.Size([2]), 1j, float("nan")],
        "many": [torch.arange(3, dtype=torch.int8), torch.tensor([True]), torch.ones(2) * 1j],
        "last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "ordered": OrderedDict(b=1, a=torch.ones(1).expand(3)),
        "others": [{1, 2}, Counter("aab"), {(1, 2): 3}, bytearray(b"x")],
    }
    save(tmp_path, 1, state=state)
    assert same(load(tmp_path, {}), state)
    with pytest.raises(ValueError, match="step-000000001 lacks sched, y of the state"):
        load(tmp_path, {"deck": 1, "sched": {}, "y": 2})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_it(tmp_path: Path) -> None:
    trained, net = training(), training()["net"]
    saved = advance(trained, 2)
    save(tmp_path, 500, state=saved)
    path = tmp_path / "step-000000500"
    assert names(path) == sorted(FILES)
    moments = {0: {"exp_avg": torch.empty(7, 5)}}
    state = {"net": net.state_dict(), "opt": {"state": moments}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert same(net.state_dict(), trained["net"].state_dict())
    moment = saved["opt"]["state"][0]["exp_avg"]
    assert same(moments[0]["exp_avg"], moment)
    dcp_to_torch_save(path, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=True)
    assert same(whole["opt"]["state"]["0"]["exp_avg"], moment)  # keys are strings there
    assert same(whole[checkpoint.PLAIN]["opt"]["param_groups"], saved["opt"]["param_groups"])


def test_later_changes_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {"x": torch.ones(9), "list": [1], "deep": [[torch.ones(2)]]}
    lines: list[str] = []
    go, write = threading.Event(), checkpoint._write
    monkeypatch.setattr(checkpoint, "_write", lambda *a: (go.wait(limit(30)), write(*a))[1])
    checkpoints = Checkpoints(tmp_path, every=1, log=lines.append)
    checkpoints.save(1, state, {})
    state["x"].zero_()
    state["list"].append(2)
    state["deep"][0].append(3)
    checkpoints.save(2, state, {})
    go.set()
    checkpoints.finish()
    then = {"x": torch.ones(9), "list": [1], "deep": [[torch.ones(2)]]}
    assert same(load(tmp_path, state), then)
    assert lines == ["checkpoint of step 2 is left out: the last one is still being written"]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_given_back(tmp_path: Path) -> None:
    """Not one of ten copies stays, of 16 MB each."""
    checkpoints = Checkpoints(tmp_path, every=1)
    state = {"x": [torch.rand(100_000) for _ in range(40)]}
    checkpoints.save(0, state, {})  # what torch imports
    checkpoints.finish()
    before = resident()
    for step in range(10):
        checkpoints.save(step, state, {})
        checkpoints.finish()
    assert resident() - before < 12e6


def test_a_copy_is_freed_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most, save = weakref.WeakSet[torch.Tensor](), [], torch.save
    make = snapshot._copy

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        alive.add(copy := make(tensor))
        return copy

    def written(tensor: Any, *rest: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            most.append(len(alive))
        save(tensor, *rest)

    monkeypatch.setattr(snapshot, "_copy", copied)
    monkeypatch.setattr(torch, "save", written)
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(1, {"x": [torch.rand(3) for _ in range(5)]}, {})
    checkpoints.finish()
    assert most == [4, 3, 2, 1, 0]  # beside the one that is being written


def copies_wait(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have the thread of a checkpoint wait for this event before it makes its copies."""
    go, finish = threading.Event(), snapshot.Snapshot.finish
    monkeypatch.setattr(
        snapshot.Snapshot, "finish", lambda self: (go.wait(limit(30)), finish(self))[1]
    )
    return go


def test_what_optimizers_change_is_copied_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view of the memory, too; and training waits in `secure` until it is copied."""
    go = copies_wait(monkeypatch)
    parameter, buffer = torch.ones(4), torch.ones(4)
    state = {"parameter": parameter[1:], "buffer": buffer}
    checkpoints = Checkpoints(tmp_path, every=1)
    checkpoints.save(1, state, {}, {snapshot.memory_of(parameter)})
    buffer.zero_()
    threading.Timer(0.1, go.set).start()
    checkpoints.secure()
    assert go.is_set()
    parameter.zero_()
    checkpoints.finish()
    assert same(load(tmp_path, state), {"parameter": torch.ones(3), "buffer": torch.ones(4)})


def test_a_parameter_that_no_optimizer_changes_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = copies_wait(monkeypatch)
    parameter = torch.ones(4)
    checkpoints = Checkpoints(tmp_path, every=1, log=lambda text: None)
    checkpoints.save(1, {"x": parameter}, {}, {snapshot.memory_of(parameter)})
    parameter.zero_()
    go.set()
    with pytest.raises(RuntimeError, match="x was changed before an optimizer's step"):
        checkpoints.finish()
    checkpoints.secure()
    assert checkpoints.newest() is None


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    tensor = torch.ones(1)
    for state, said in (
        ({"a": [{"b": lambda: None}]}, "a.0.b, a function"),
        ({"a": {"w": tensor.to_sparse()}}, "a.w: it is not a whole, dense tensor"),
        ({"a": tensor.to("meta")}, "cannot hold a:"),
        ({"a": {0: tensor, "0": tensor}}, "named a.0"),
        ({"a": {"b": tensor}, "a.b": tensor}, "named a.b"),
        ({"ringcomm": {"plain": tensor}}, "named ringcomm.plain"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            save(tmp_path, 1, state=state)
    assert names(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match="checkpoint of step 1 could not be written to /"):
        save(tmp_path / "file", 1)


def test_due() -> None:
    steps = Checkpoints("unused", every=3)
    assert [step for step in range(10) if steps.due(step, 0.0)] == [3, 6, 9]
    period = Checkpoints("unused", every=timedelta(seconds=10))
    times = [100.0, 105.0, 110.0, 111.0, 119.9, 121.0, 130.9, 131.0]
    assert list(filter(lambda now: period.due(1, now), times)) == [110.0, 121.0, 131.0]
    for every, keep in ((0, 2), (timedelta(0), 2), (1, 0)):
        with pytest.raises(ValueError, match="=0"):
            Checkpoints("unused", every=every, keep=keep)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, file: str, kind: str) -> None:
    save(tmp_path, 1, 2)
    path = tmp_path / "step-000000002" / file
    whole = path.read_bytes()
    sample = range(0, len(whole), 3 if file == MANIFEST else 97)
    places = {"missing": [0], "truncated": [0, 50, len(whole) - 1], "flipped": sample}
    for at in places[kind]:
        if kind == "missing":
            path.unlink()
        else:
            (flip if kind == "flipped" else os.truncate)(path, at)
        lines: list[str] = []
        newest = Checkpoints(tmp_path, every=1, log=lines.append).newest()
        assert newest == (tmp_path / "step-000000001", 1, {"epoch": 1})
        [line] = lines
        assert line.startswith(f"checkpoint {path.parent} is passed over: {file} ")
        path.write_bytes(whole)
    assert Checkpoints(tmp_path, every=1).newest() == (path.parent, 2, {"epoch": 2})


def test_none_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert Checkpoints(folder, every=1).newest() is None
    save(folder, 1)
    (folder / "step-000000001" / MANIFEST).unlink()
    with pytest.raises(RuntimeError, match=f"no checkpoint in {folder} is whole: put"):
        Checkpoints(folder, every=1).newest()


def test_what_is_kept(tmp_path: Path) -> None:
    """The newest whole ones; a damaged one until its step comes again."""
    assert save(tmp_path, 1, 2, 3, 4, 5) == []
    assert names(tmp_path) == ["step-000000004", "step-000000005"]
    flip(tmp_path / "step-000000005" / ".metadata", 100)
    (tmp_path / "step-000000004" / ".metadata").unlink()
    save(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-000000004.1", "step-000000005"]
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-000000005.1"]
    assert same(load(tmp_path, {}), {"x": torch.full((100,), 5.0)})


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this is run",)


def test_no_file_runs_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even with a manifest that says all is right."""
    save(tmp_path, 1)
    path, stream = tmp_path / "step-000000001", io.BytesIO()
    torch.save(Evil(), stream)
    manifest = json.loads((path / MANIFEST).read_bytes())
    for file, evil in ((".metadata", pickle.dumps(Evil())), (FILES[0], stream.getvalue())):
        (path / file).write_bytes(evil)
        digest = checkpoint._hash(path / file)
        manifest["files"][file] = {"bytes": len(evil), "blake2b": digest}
    manifest["entries"][checkpoint.PLAIN] = [FILES[0], 0, len(stream.getvalue())]
    (path / MANIFEST).write_bytes(checkpoint._seal(manifest))
    with pytest.raises(RuntimeError, match="cannot be read: Weights only load failed"):
        load(tmp_path, {})
    assert "this is run" not in capfd.readouterr().out


def test_killed(outcomes: Any) -> None:
    """At each call of the file system in turn, or at any time: the old or the new one is whole."""
    steps = [step for step, _, _ in outcomes["killed"]]
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
    assert sum(left > 0 for _, left, _ in outcomes["killed"]) > 15
    assert outcomes["any time"] == sorted(outcomes["any time"])
    assert outcomes["any time"][-1] > 1


def test_failed(outcomes: Any) -> None:
    """Each call of the file system in turn, or a write in the middle; one line says so."""
    for step, left, lines in outcomes["failed"]:
        assert (step == 2 and not left) or len(lines) == 1
        assert not left or "could not be removed" in lines[0]
        for line in lines:
            assert "No space left on device" in line
            assert line.endswith(AGAIN) or "could not be removed" in line
    assert sum(len(lines) for _, _, lines in outcomes["failed"]) > 15
    assert outcomes["failed"][-1] == [2, 0, []]
    line, *outcome = outcomes["too large"]
    assert line.endswith(f"/0: File too large; {AGAIN}")
    assert outcome == [3, 0]


def test_synced_before_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "all", 1)
    did: list[str] = []
    rename, links = os.rename, Path("/proc/self/fd")

    def renamed(old: Path, new: Path) -> None:
        did.append(f"to {new.name.split('-')[0]}")
        rename(old, new)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "fsync", lambda n: did.append((links / str(n)).readlink().name))
    save(tmp_path / "all", 1, keep=1)
    assert did.pop(4).startswith(".writing")
    files = [".metadata", "__0_0.distcp", MANIFEST]
    assert did == ["to .metadata", *files, "to step", "all", "to .writing"]


def test_leftovers(tmp_path: Path) -> None:
    host, none = checkpoint.HOST, 2**22 + 1  # a process that cannot be
    gone = [f".writing-{host}-{none}-a", f".writing-{host}-{os.getpid()}-a", ".writing-other-1-old"]
    stay = [f".writing-{host}-1-a", ".writing-other-1-new", ".writing", "mine"]
    for name in gone + stay:
        (tmp_path / name).mkdir()
        (tmp_path / name / FILES[0]).touch()
    for path in (tmp_path / gone[2] / FILES[0], tmp_path / gone[2]):
        os.utime(path, (0, path.stat().st_mtime - 2 * checkpoint.ABANDONED_SECONDS))
    save(tmp_path, 1)
    assert names(tmp_path) == sorted([*stay, "step-000000001"])
