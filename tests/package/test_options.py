"""ringcomm.Options and the variables: one table in ringcomm/options.py makes both."""

from __future__ import annotations

import ast
import copy
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcomm
from lab import ROOT
from lab.limits import limit
from lab.outcomes import Outcome, in_child
from lab.ranks import error_of
from ringcomm import _planner
from ringcomm._runtime import library
from ringcomm.options import (
    ALGORITHMS,
    ATTRIBUTES,
    VARIABLES,
    unknown_variables,
)

CPU = torch.device("cpu")
COLLECTIVES = (
    "all_reduce broadcast reduce all_gather reduce_scatter all_to_all gather scatter barrier"
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        if name != "RINGCOMM_TEST_LEVEL":
            monkeypatch.delenv(name, raising=False)


# ---- what is made of the table


def test_the_page_is_of_the_table() -> None:
    script = ROOT / "docs" / "write_options.py"
    command = [sys.executable, str(script), "--check"]
    assert subprocess.run(command, timeout=limit(60)).returncode == 0, (
        "write it again: `python docs/write_options.py`"
    )


def test_the_stub_is_of_the_library() -> None:
    """The stub names all that Config and Options have, and nothing else."""
    tree = ast.parse((ROOT / "ringcomm" / "_C.pyi").read_text())
    loaded = library.load_library()
    for name in ("Config", "Options"):
        (stub,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
        fields = [n.target for n in stub.body if isinstance(n, ast.AnnAssign)]
        said = {field.id for field in fields if isinstance(field, ast.Name)}
        there = {k for k, v in vars(getattr(loaded, name)).items() if isinstance(v, property)}
        assert said - there <= {"_timeout"}, "torch's"  # from the base class
        assert there <= said


def test_every_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match="there is no algorithm 'x'") as caught:
        ringcomm.Options(algorithm="x")
    assert str(caught.value).partition("use one of ")[2].split(", ") == list(ALGORITHMS)
    assert _planner.ALGORITHMS == ALGORITHMS


def test_every_variable_that_is_read_is_in_the_table() -> None:
    """And every one of the table is read somewhere: by its name, or as an attribute of Options."""
    folders = ("ringcomm", "lab", "tests", "scripts", "csrc")
    paths = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    texts = [p.read_text() for p in [*paths, ROOT / "setup.py"] if p.suffix in {".py", ".sh"}]
    read = re.compile(r"environ(?:\.get\(|\[)\s*\"(RINGCOMM_\w+)\"|\$\{(RINGCOMM_\w+)")
    read_ = {name for text in texts for pair in read.findall(text) for name in pair if name}
    assert {"RINGCOMM_SECRET_FILE", "RINGCOMM_AS", "RINGCOMM_WERROR"} <= read_
    # between two of our own scripts
    others = {"RINGCOMM_ASSETS", "RINGCOMM_BUILT", "RINGCOMM_WHEEL_TAG", "RINGCOMM_URL"}
    assert {n for n in read_ - others if not n.startswith("RINGCOMM_SIM_")} <= set(VARIABLES)
    by_attribute = {f"RINGCOMM_{name.upper()}" for name in ATTRIBUTES}
    by_row = {
        name.upper() for text in texts for name in re.findall(r"Variables\.(\w+)\.read", text)
    }
    assert set(VARIABLES) - read_ - by_attribute <= {f"RINGCOMM_{name}" for name in by_row}


# ---- values


GOOD: dict[str, tuple[str, Any]] = {  # as a variable, and as a value
    "algorithm": ("tree", "tree"),
    "spin_us": ("0", 0),
    "threads": ("64", 64),
    "cuda_mode": ("ipc", "ipc"),
    "cuda_memory": ("262144", 1 << 18),
    "cuda_blocks": ("32", 32),
    "shared_buffers": ("1073741824", 1 << 30),
    "ifname": ("eth0,^docker", "eth0,^docker"),
    "ports": ("40000-40010", "40000-40010"),
    "transport": ("tcp", "tcp"),
    "flows": ("16", 16),
    "congestion": ("bbr", "bbr"),
    "resume_seconds": ("86400", 86_400),
    "secret": ("bees", "bees"),
    "tls": ("on", "on"),
    "tls_cert": ("/a/cert.pem", "/a/cert.pem"),
    "tls_key": ("/a/key.pem", "/a/key.pem"),
    "tls_ca": ("/a/ca.pem", "/a/ca.pem"),
    "costs": ("/a/file", "/a/file"),
    "host": ("node-3", "node-3"),
    "cuda_library": ("/a/library.so", "/a/library.so"),
    "log": ("error", "error"),
    "trace": ("/records", "/records"),
    "trace_lines": ("1", "1"),
    "metrics": ("/numbers-%r.prom", "/numbers-%r.prom"),
}


def test_every_attribute_is_tested_here() -> None:
    assert set(GOOD) == set(ATTRIBUTES)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_value_by_each_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code wins over the variable, the variable over the default, and None takes code's back."""
    text, value = GOOD[name]
    setting = ATTRIBUTES[name]
    monkeypatch.delenv(setting.variable, raising=False)
    options = ringcomm.Options()
    assert getattr(options, name) == setting.default != value
    setattr(options, name, value)
    assert getattr(options, name) == getattr(ringcomm.Options(**{name: value}), name) == value
    setattr(options, name, None)
    assert getattr(options, name) == setting.default
    monkeypatch.setenv(setting.variable, text)
    assert getattr(ringcomm.Options(), name) == value
    setattr(options, name, None)
    assert getattr(options, name) == value, "None is what the variable says now"
    if setting.default is not None:
        assert getattr(ringcomm.Options(**{name: setting.default}), name) == setting.default
    monkeypatch.setenv(setting.variable, "")
    assert getattr(ringcomm.Options(), name) == setting.default, "an empty variable says nothing"


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("flows", 0, ValueError, "flows=0 is not a number of connections from 1 to 16, or auto"),
    ("flows", 17, ValueError, "flows=17 is not a number of connections from 1 to 16"),
    ("flows", "2", TypeError, "flows=2: flows is of type int, not str"),
    ("flows", True, TypeError, "flows=True: flows is of type int, not bool"),
    ("spin_us", -1, ValueError, "is not a number of microseconds from 0 to 1000000"),
    ("resume_seconds", 0.5, TypeError, "is of type int, not float"),
    ("cuda_memory", 1, ValueError, "is not a number of bytes from 262144 to 1099511627776"),
    ("log", "loud", ValueError, "log=loud is not a level: use debug, info, warning, error or off"),
    ("transport", "udp", ValueError, "transport=udp is no transport: use auto, or tcp"),
    ("cuda_mode", "fast", ValueError, "cuda_mode=fast is no way for CUDA tensors: use auto, ipc"),
    ("algorithm", "sing", ValueError, "there is no algorithm 'sing': use one of direct, ring"),
    ("ports", "2-1", ValueError, "ports=2-1 is neither a port nor a range of ports"),
    ("ifname", "^", ValueError, "ifname=^: '' is none of eth (a name or its beginning)"),
    ("secret", Path("/nowhere"), ValueError, "secret=/nowhere cannot be read"),
    ("secret", 7, TypeError, "is of type str, not int"),
    ("tls", "yes", ValueError, "tls=yes is neither off nor on"),
]


@pytest.mark.parametrize(("name", "value", "kind", "text"), WRONG)
def test_a_wrong_value_is_an_error_at_once(
    name: str, value: Any, kind: type[Exception], text: str
) -> None:
    options = ringcomm.Options()
    with pytest.raises(kind, match=re.escape(text)) as assigned:
        setattr(options, name, value)
    assert "\n" not in str(assigned.value)
    assert getattr(options, name) == ATTRIBUTES[name].default, "it has not changed"
    with pytest.raises(kind, match=re.escape(text)):
        ringcomm.Options(**{name: value})


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text, told in (
        ("RINGCOMM_FLOWS", "99", " is not a number of connections from 1 to 16"),
        ("RINGCOMM_FLOWS", "2x", " is not a number of connections from 1 to 16, or auto"),
        ("RINGCOMM_LOG", "loud", " is not a level: use debug, info, warning, error or off"),
    ):
        with monkeypatch.context() as here:
            here.setenv(name, text)
            with pytest.raises(ValueError, match=re.escape(f"{name}={text}{told}")):
                ringcomm.Options()


def test_what_one_may_have_meant() -> None:
    with pytest.raises(TypeError, match=r"Options has no 'flow': did you mean 'flows'"):
        ringcomm.Options(flow=2)  # type: ignore[call-arg]
    options = ringcomm.Options()
    with pytest.raises(AttributeError, match="has no 'algoritm': did you mean 'algorithm'"):
        options.algoritm = "ring"  # type: ignore[attr-defined]


def test_copies_and_what_is_shown() -> None:
    options = ringcomm.Options(timedelta(seconds=3), algorithm="ring", flows=2, secret="bees")
    shown = "algorithm='ring', flows=2, secret='...')"
    for copied in (copy.deepcopy(options), copy.copy(options)):
        assert repr(copied) == f"ringcomm.Options(timeout={timedelta(seconds=3)!r}, {shown}"
        copied.flows = 5
        copied.secret = None
        assert (copied.flows, copied.secret) == (5, "")
    assert (options.flows, options.secret) == (2, "bees")
    assert repr(ringcomm.Options(timeout=timedelta(1))) == "ringcomm.Options(timeout=" + (
        f"{timedelta(1)!r})"
    )


def test_a_secret_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("bees\nand more\n")
    file.chmod(0o600)
    assert ringcomm.Options(secret=file).secret == "bees"
    monkeypatch.setenv("RINGCOMM_SECRET", "wasps")
    monkeypatch.setenv("RINGCOMM_SECRET_FILE", str(file))
    assert ringcomm.Options().secret == "bees", "the file wins"
    assert ringcomm.Options(secret="ants").secret == "ants"
    file.chmod(0o640)
    with pytest.raises(ValueError, match=f"RINGCOMM_SECRET_FILE={file} can be read by others: "):
        ringcomm.Options()
    file.write_text("\n")
    file.chmod(0o400)
    with pytest.raises(ValueError, match="is empty"):
        ringcomm.Options()


# ---- groups of a process


def start(options: Any = None) -> None:
    words = {} if options is None else {"pg_options": options}
    store = dist.HashStore()
    dist.init_process_group("ringcomm", store=store, rank=0, world_size=1, **words)


def first(options: Any) -> Any:
    """Make the default group; return its options."""
    start(options)
    return dist.group.WORLD._get_backend(CPU).options


def test_the_process_keeps_what_its_first_group_has_set() -> None:
    def body() -> Outcome:
        os.environ["RINGCOMM_FLOWS"] = "3"
        told = first(ringcomm.Options(resume_seconds=7, algorithm="ring", spin_us=5))
        os.environ["RINGCOMM_FLOWS"] = "4"  # too late: nobody reads it
        dist.new_group([0])
        dist.new_group([0], pg_options=ringcomm.Options(flows=3, algorithm="tree"))
        dist.new_group([0], pg_options=told)
        other = ringcomm.Options(secret="bees")
        dist.new_group([0], pg_options=ringcomm.Options(trace="elsewhere"))  # this ends no job
        return {
            "told": [told.flows, told.resume_seconds, told.algorithm, told.spin_us],
            "next": ringcomm.Options().flows,
            "flows": error_of(
                lambda: dist.new_group([0], pg_options=ringcomm.Options(flows=4, spin_us=1))
            ),
            "secret": error_of(lambda: dist.new_group([0], pg_options=other)),
        }

    same = "give all groups of a process the same"
    ours = "and the first group of this process has set"
    assert in_child(body) == {
        "told": [3, 7, "ring", 5],
        "next": 3,
        "flows": ["ValueError", f"a group asks for flows=4, {ours} flows=3: {same}"],
        "secret": ["ValueError", f"a group asks for another secret, {ours} its own: {same}"],
    }


def test_a_split_is_held_to_it_too() -> None:
    def body() -> Outcome:
        first(ringcomm.Options(flows=2, spin_us=5, algorithm="ring"))

        def part(options: Any) -> Any:
            world = dist.group.WORLD
            return world.split_group([0], timedelta(seconds=30), options, None, "part")

        def spin(options: Any) -> Any:
            return part(options)._get_backend(CPU).options.spin_us

        return {
            "parent's": spin(None),
            "own": spin(ringcomm.Options(spin_us=6)),
            "error": error_of(lambda: part(ringcomm.Options(flows=4)))[1],
        }

    answer = in_child(body)
    assert "a group asks for flows=4, and the first group of this process" in answer.pop("error")
    assert answer == {"parent's": 5, "own": 6}


def test_a_forked_child_has_its_own() -> None:
    def body() -> Outcome:
        first(ringcomm.Options(flows=2))

        def child() -> Outcome:
            dist.distributed_c10d.destroy_process_group()
            return {"flows": first(ringcomm.Options(flows=5)).flows}

        return in_child(child)

    assert in_child(body) == {"flows": 5}


def test_options_of_another_backend_are_refused() -> None:
    def body() -> Outcome:
        other = torch._C._distributed_c10d.Backend.Options("other")
        return {"error": error_of(lambda: start(other))}

    told = "pg_options of a ringcomm group must be ringcomm.Options, not Options"
    assert in_child(body)["error"] == ["TypeError", told]


def test_the_core_does_as_options_say(capfd: pytest.CaptureFixture[str]) -> None:
    """The log is of the process; the algorithm of the group."""

    def body() -> Outcome:
        first(ringcomm.Options(log="info", algorithm="ring"))
        dist.all_reduce(torch.ones(1000))
        return {}

    assert in_child(body) == {}
    line = "all_reduce #1 float32[1000] SUM, ring (the algorithm that was asked for)"
    assert line in capfd.readouterr().err


# ---- unknown variables


def test_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> Outcome:
        return {"error": error_of(start)}

    monkeypatch.setenv("RINGCOMM_FLOWZ", "2")
    monkeypatch.setenv("RINGCOMM_SIM_ANYTHING", "2")
    assert list(unknown_variables()) == [("RINGCOMM_FLOWZ", "RINGCOMM_FLOWS")]
    assert in_child(body) == {"error": ["", ""]}
    monkeypatch.setenv("RINGCOMM_STRICT", "1")
    told = "unknown environment variable RINGCOMM_FLOWZ: did you mean RINGCOMM_FLOWS?"
    assert in_child(body) == {"error": ["ValueError", told]}
    monkeypatch.setenv("RINGCOMM_STRICT", "yes")
    assert in_child(body) == {"error": ["ValueError", "RINGCOMM_STRICT=yes is neither 0 nor 1"]}


def test_the_log_level_of_code_counts_for_warnings(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RINGCOMM_FLOWZ", "2")
    for level, lines in (("error", 0), ("warning", 1)):

        def body(level: str = level) -> Outcome:
            start(ringcomm.Options(log=level))
            return {}

        assert in_child(body) == {}
        assert capfd.readouterr().err.count("unknown environment variable") == lines
