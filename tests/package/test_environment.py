"""Programs that do not name ringcomm get it: RINGCOMM_AS=gloo and RINGCOMM_DEFAULT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from ringcomm._runtime.addresses import parse_filter

SERVED = "ringcomm INFO: RINGCOMM_AS=gloo: groups that ask for gloo on the CPU are ringcomm's\n"
OURS, GLOOS = "ringcomm", "gloo"

# Each case is a program of its own, with its own environment, in a child of one interpreter that
# has imported torch: as `python -c`, but for the seconds that the import takes. The backend is
# registered as torch's autoload does it, after torch.
EACH = """
import json, os, sys, tempfile
import torch, torch.distributed as dist
PRELUDE = '''
import torch, torch.distributed as dist
import ringcomm._runtime.registration
ringcomm._runtime.registration.register()
def start(name, **more):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1, **more)
def who(group=None):  # C++ names a backend after itself, a group after what it was asked for
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    assert ones.tolist() == [1, 1, 1]
    return backend.name()
'''
def run(settings, source):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(settings)
            exec(PRELUDE + source, {})
            sys.stdout.flush()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        for file in (out, err):
            file.seek(0)
        return [status, out.read().decode(), err.read().decode()]
print(json.dumps([run(*case) for case in json.load(open("cases"))]))
"""


def said(python: Run, tmp_path: Path, cases: list[tuple[dict[str, str], str]]) -> list[list[str]]:
    """Run every (environment, source); return what each wrote to stdout and to stderr."""
    (tmp_path / "cases").write_text(json.dumps(cases))
    result = python(EACH, TORCH_DEVICE_BACKEND_AUTOLOAD="0", GLOO_SOCKET_IFNAME="lo")
    assert result.returncode == 0, result.stderr
    answers: list[Any] = json.loads(result.stdout)
    for (settings, source), (status, _, stderr) in zip(cases, answers, strict=True):
        assert status == 0, f"{settings} {source}\n{stderr}"
    return [[stdout, stderr] for _, stdout, stderr in answers]


# ---- RINGCOMM_AS

PROGRAM = """
import torch, torch.distributed as dist
from ringcomm._runtime.backend import backend_of
dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [None, dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")]
for group in groups:
    backend_of(group).flight_record()
    assert dist.get_backend(group) == "gloo", dist.get_backend(group)
    # torch's C++ must not take the object for a ProcessGroupGloo: it would read its members.
    assert (group or dist.group.WORLD).name() == "custom"
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == 3
    dist.monitored_barrier(group)
# Its logger asks a group that is called Gloo for a ProcessGroupGloo's options.
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.full((1, 4), rank + 1.0)).sum().backward()
assert model.module.weight.grad.eq(1.5).all(), model.module.weight.grad
lists = [None, None]
dist.all_gather_object(lists, rank)
assert lists == [0, 1]
dist.destroy_process_group()
"""


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_a_program_that_asks_for_gloo_runs_unchanged(
    level: str, torchrun: Run, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = torchrun(2, script, RINGCOMM_AS="gloo", TORCH_DISTRIBUTED_DEBUG=level)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("ringcomm INFO") == 1, "one line a job"
    assert SERVED in result.stderr


def test_every_way_to_ask_for_gloo(python: Run, tmp_path: Path) -> None:
    source = """if True:
        start({})
        print(who(), dist.get_backend(), dist.get_backend_config(), dist.group.WORLD.name())
        assert not dist.group.WORLD._has_hooks()
        assert who(dist.new_group([0])) == who(dist.new_group([0], backend="gloo")) == who()
        dist.destroy_process_group()
    """
    ways = {
        "'gloo'": "gloo cpu:gloo,cuda:gloo",
        "'GLOO'": "gloo cpu:gloo,cuda:gloo",
        "'cpu:gloo'": "cpu:gloo cpu:gloo",
        "None": "undefined cpu:gloo",
    }
    cases = [({"RINGCOMM_AS": "gloo"}, source.format(way)) for way in ways]
    for answer, words in zip(said(python, tmp_path, cases), ways.values(), strict=True):
        assert answer == [f"{OURS} {words} custom\n", SERVED]


def test_what_is_left_to_others(python: Run, tmp_path: Path) -> None:
    """Another device keeps its backend, and Gloo itself is had with options of Gloo's own type."""
    other = """if True:
        made = []
        def other(store, rank, size, timeout):
            made.append("other")
            return dist.ProcessGroupGloo(store, rank, size, timeout)
        dist.Backend.register_backend("other", other, devices=["cuda"])
        options = torch._C._distributed_c10d.Backend.Options("other")
        start("{}", pg_options=options)
        print(who(), dist.get_backend(), *made)
        dist.destroy_process_group()
    """
    gloo = """if True:
        start("gloo")
        group = dist.new_group([0], backend="gloo", pg_options=dist.ProcessGroupGloo._Options())
        print(who(), who(group), dist.get_backend(group), group.name())
        dist.destroy_process_group()
    """
    off = """if True:
        for name in ("gloo", None):
            start(name)
            print(who())
            dist.destroy_process_group()
    """
    answers = said(
        python,
        tmp_path,
        [
            ({"RINGCOMM_AS": "gloo"}, other.format("cpu:gloo,cuda:other")),
            ({"RINGCOMM_AS": "gloo"}, gloo),
            ({"RINGCOMM_AS": "", "RINGCOMM_DEFAULT": ""}, off),
            ({"RINGCOMM_AS": ""}, other.format("cpu:ringcomm,cuda:other")),
        ],
    )
    assert answers[0] == [f"{OURS} cpu:gloo,cuda:other other\n", SERVED]
    assert answers[1] == [f"{OURS} {GLOOS} gloo gloo\n", SERVED]
    assert answers[2] == [f"{GLOOS}\n{GLOOS}\n", ""]
    assert answers[3][0] == "ringcomm cpu:ringcomm,cuda:other other\n"  # whose options are not ours


def test_what_programs_do_to_gloos_groups(python: Run, tmp_path: Path) -> None:
    """Both look for Gloo's own type; a warning would say that the first did nothing."""
    source = """if True:
        import datetime, warnings
        warnings.simplefilter("error")
        start("gloo")
        both = [None, dist.new_group([0], pg_options=dist.ProcessGroupGloo._Options())]
        for group in both:
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=7), group)
            group = group or dist.group.WORLD
            backend = group._get_backend(torch.device("cpu"))
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            print(who(group), backend.options._timeout.seconds, group.name(), group._has_hooks())
        dist.destroy_process_group()
    """
    ((told, _),) = said(python, tmp_path, [({"RINGCOMM_AS": "gloo"}, source)])
    assert told == f"{OURS} 7 custom False\n{GLOOS} 7 gloo False\n"


def test_gloos_interfaces_are_ours_unless_we_have_some(python: Run, tmp_path: Path) -> None:
    source = "start('gloo')\nprint(os.environ.get('RINGCOMM_IFNAME'))"
    asked = {"RINGCOMM_AS": "gloo", "GLOO_SOCKET_IFNAME": "eth0,lo"}
    cases = [
        (asked, "import os\n" + source),
        ({**asked, "RINGCOMM_IFNAME": "eth1"}, "import os\n" + source),
        ({**asked, "RINGCOMM_AS": "", "GLOO_SOCKET_IFNAME": "lo"}, "import os\n" + source),
    ]
    told = [stdout for stdout, _ in said(python, tmp_path, cases)]
    assert told == ["=eth0,lo\n", "eth1\n", "None\n"]
    assert all(item.exact for item in parse_filter("=eth0,lo"))


def test_debugging_and_logging(python: Run, tmp_path: Path) -> None:
    detail = """if True:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        start("gloo")
        print(who(), dist.get_backend(), dist.group.WORLD.name())
        dist.destroy_process_group()
    """
    levels = {"debug": SERVED, "info": SERVED, "warning": "", "error": "", "off": ""}
    cases = [({"RINGCOMM_AS": "gloo", "RINGCOMM_LOG": level}, "start('gloo')") for level in levels]
    answers = said(python, tmp_path, [({"RINGCOMM_AS": "gloo"}, detail), *cases])
    assert answers[0] == [f"{OURS} gloo custom\n", SERVED]
    for (_, stderr), line in zip(answers[1:], levels.values(), strict=True):
        assert stderr.count(SERVED) == bool(line)


def test_a_rank_without_the_variable(tmp_path: Path, python: Run) -> None:
    """It waits in Gloo, and the others for it: they say what the likely cause is."""
    alone = f"""if True:
        from datetime import timedelta
        import torch.distributed as dist
        store = dist.FileStore({str(tmp_path / "store")!r}, 2)
        dist.init_process_group(
            "gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=1)
        )
    """
    result = python(alone, RINGCOMM_AS="gloo")
    assert result.returncode != 0
    assert "RINGCOMM_AS=gloo is set for this rank: a rank without it waits in Gloo" in result.stderr


# ---- RINGCOMM_DEFAULT


def test_the_default_of_a_device(python: Run, tmp_path: Path) -> None:
    source = """if True:
        print(*map(dist.get_default_backend_for_device, ("cpu", "cuda")))
        start(None)
        print(who())
        assert who(dist.new_group([0])) == who()
        assert not dist.group.WORLD._has_hooks()
        assert dist.group.WORLD._device_types == [torch.device("cpu")]
        dist.destroy_process_group()
    """
    defaults = {
        "cpu": (OURS, "nccl"),
        "cuda": (GLOOS, OURS),
        "cpu,cuda": (OURS, OURS),
        "cuda, cpu": (OURS, OURS),
    }
    cases = [({"RINGCOMM_DEFAULT": value}, source) for value in defaults]
    for answer, (cpu, cuda) in zip(said(python, tmp_path, cases), defaults.values(), strict=True):
        assert answer == [f"{cpu} {cuda}\n{cpu}\n", ""]


def test_with_an_accelerator_both_parts_are_ours(python: Run, tmp_path: Path) -> None:
    """By itself torch makes only the accelerator's part; tensors of the CPU have none."""
    source = """if True:
        torch.cuda.device_count = lambda: 1  # as on a machine that has one
        torch._C._get_accelerator = lambda: torch.device("cuda")
        start(None)
        cuda = dist.group.WORLD._get_backend(torch.device("cuda"))
        print(who(), dist.get_backend_config(), cuda.name())
    """
    (answer,) = said(python, tmp_path, [({"RINGCOMM_DEFAULT": "cpu,cuda"}, source)])
    assert answer == [f"{OURS} cuda:ringcomm {OURS}\n", ""]


def test_a_mesh_is_made_of_the_default(torchrun: Run, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("""
import torch, torch.distributed as dist
mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
for name in ("dp", "tp"):
    group = mesh.get_group(name)
    group._get_backend(torch.device("cpu")).flight_record()
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == group.size()
dist.destroy_process_group()
""")
    result = torchrun(2, script, RINGCOMM_DEFAULT="cpu,cuda")
    assert result.returncode == 0, result.stderr


# ---- what is no value


def test_an_unknown_value_is_refused(python: Run, tmp_path: Path) -> None:
    """At the first group: `import torch` must go well in every program on the machine."""
    source = """if True:
        try:
            start("gloo")
        except ValueError as error:
            print(error)
    """
    stand_in = "is no backend that ringcomm can stand in for: set RINGCOMM_AS=gloo, or unset it"
    default = (
        "is no list of device types that ringcomm serves: set it to cpu, to cuda or to cpu,cuda"
    )
    wrong = {
        ("RINGCOMM_AS", "nccl"): stand_in,
        ("RINGCOMM_AS", "Gloo"): stand_in,
        ("RINGCOMM_DEFAULT", "gpu"): default,
        ("RINGCOMM_DEFAULT", "cpu;cuda"): default,
        ("RINGCOMM_DEFAULT", "cpu,"): default,
    }
    cases = [({name: value}, source) for name, value in wrong]
    answers = said(python, tmp_path, cases)
    for answer, ((name, value), words) in zip(answers, wrong.items(), strict=True):
        assert answer == [f"{name}={value} {words}\n", ""]


MISSPELT = """
for name in ("ringcom", "RingComms", "cpu:ringcom,cuda:nccl", "nosuch"):
    try:
        start(name)
    except (ValueError, AssertionError) as error:
        print(error)
"""


def test_a_misspelt_name(python: Run, tmp_path: Path) -> None:
    """For any other unknown name torch raises its own error, and warns once."""
    [[stdout, stderr]] = said(python, tmp_path, [({}, MISSPELT)])
    meant = "Unknown backend type {}: did you mean 'ringcomm'?\n"
    names = ("'ringcom'", "'ringcomms'", "'ringcom'")
    assert stdout == "".join(map(meant.format, names)) + "Unknown backend type nosuch\n"
    assert stderr.count("Device capability of nosuch unknown") <= 1
