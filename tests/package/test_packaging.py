"""The package as users meet it: found by torch without an import, loaded late, never in the way."""

import re
import subprocess
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest
import torch
from conftest import Run

from lab.linked import common_variables
from ringcomm._runtime import library

GROUPS = ["torch.backends", "torch.distributed.backends"]

# One rank needs no peer: a store in memory, and no launcher.
ALONE = {"ZYGOTE_OFF": "1"}  # for interpreters that have imported nothing: lab/zygote.py
ONE_RANK = """
import datetime, sys, warnings
import torch, torch.distributed as dist
def start(name):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1,
                            timeout=datetime.timedelta(seconds=20))
"""


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


@pytest.mark.parametrize("group", GROUPS)
def test_torch_finds_the_entry_point(group: str) -> None:
    ours = [entry for entry in entry_points(group=group) if entry.name == "ringcomm"]
    assert [entry.value for entry in ours] == ["ringcomm._runtime.registration:register"]
    ours[0].load()


def test_the_version_is_one() -> None:
    import ringcomm

    assert distribution("ringcomm").version == ringcomm.__version__


def test_available_without_an_import(python: Run) -> None:
    result = python(
        """if True:
        import sys, torch, torch.distributed as dist
        assert dist.is_backend_available("ringcomm")
        cuda = ["cuda"] if torch.backends.cuda.is_built() else []
        assert dist.Backend.backend_capability["ringcomm"] == ["cpu", *cuda]
        assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
        assert "ringcomm._C" not in sys.modules, "the library was loaded by `import torch`"
        assert "ringcomm/_C" not in open("/proc/self/maps").read()
    """,
        **ALONE,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_an_import_registers_where_torch_looks_for_no_plugins(python: Run) -> None:
    result = python(
        """if True:
        import torch, torch.distributed as dist
        assert "RINGCOMM" not in dist.Backend._plugins
        import ringcomm
        assert "RINGCOMM" in dist.Backend._plugins
    """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("first", ["torch", "ringcomm", "ringcomm._runtime.registration"])
def test_any_order_of_imports(python: Run, first: str) -> None:
    result = python(
        f"""if True:
        import {first}
        import torch, ringcomm
        assert torch.distributed.is_backend_available("ringcomm")
    """,
        **ALONE,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_registering_again_changes_nothing(python: Run) -> None:
    result = python("""if True:
        import torch.distributed.distributed_c10d as c10d
        from ringcomm._runtime.registration import register
        def state():
            return (c10d._new_process_group_helper, dict(c10d.Backend._plugins),
                    list(c10d.Backend.backend_list))
        before = state()
        register()
        c10d.Backend._plugins.pop("RINGCOMM")  # as after a reload of torch's module
        register()
        assert state() == before
    """)
    assert result.returncode == 0, result.stderr


def test_a_failure_to_register_is_a_warning(python: Run) -> None:
    result = python(
        """if True:
        import torch.distributed as dist
        def broken(*args, **kwargs):
            raise OSError("no such luck")
        dist.Backend.register_backend = broken
        import ringcomm
        print("still running")
    """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert result.stdout == "still running\n", result.stderr
    assert "UserWarning: ringcomm could not register itself: OSError('no such luck')" in (
        result.stderr
    )


def test_a_library_of_another_version_is_refused_before_it_is_loaded(python: Run) -> None:
    result = python(
        ONE_RANK
        + """if True:
        from ringcomm._runtime import library
        def refusal():
            try:
                start("ringcomm")
            except ImportError as error:
                assert "ringcomm._C" not in sys.modules
                assert "ringcomm/_C" not in open("/proc/self/maps").read()
                return str(error)
        processor = library.built()[0].processor
        for owner, name, value in (
            (torch, "__version__", "2.9.1+cpu"),
            (torch, "__version__", "2.99.0"),
            (library, "SUFFIX", f".cpython-37-{processor}-linux-gnu.so"),
            (library, "SUFFIX", library.SUFFIX.replace(processor, "vax")),
        ):
            right = getattr(owner, name)
            setattr(owner, name, value)
            print(refusal())
            setattr(owner, name, right)
        assert refusal() is None
    """
    )
    assert result.returncode == 0, result.stderr
    rebuild = "rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps .`"
    build, *others = library.built()
    assert not others
    assert build.torch == minor(torch.__version__)
    were = f"ringcomm was built for torch {build.torch} but torch"
    assert result.stdout.splitlines() == [
        f"{were} 2.9 is running: {rebuild}",
        f"{were} 2.99 is running: {rebuild}",
        f"ringcomm was built for Python {build.Python} but Python 3.7 is running: {rebuild}",
        f"ringcomm was built for processor {build.processor} but processor vax is running: "
        f"{rebuild}",
    ]


def test_what_is_not_built_says_so(python: Run, tmp_path: Path) -> None:
    result = python(f"""if True:
        import pathlib, ringcomm
        ringcomm.library.FOLDER = pathlib.Path({str(tmp_path)!r})
        try:
            ringcomm.Options
        except ImportError as error:
            print(error)
    """)
    assert result.stdout.startswith("ringcomm is not built: run `pip install"), result.stderr


def test_a_package_says_what_it_is_built_for(tmp_path: Path) -> None:
    for name in ("2_9.cpython-310-x86_64", "2_11.cpython-314-aarch64"):
        (tmp_path / f"_C_torch{name}-linux-gnu.so").touch()
    assert sorted(library.built(tmp_path)) == [
        library.Build("aarch64", "3.14", "2.11"),
        library.Build("x86_64", "3.10", "2.9"),
    ]


def test_versions_are_told_shortly() -> None:
    assert library.span(["2.11", "2.9", "2.10", "2.9"]) == "2.9 to 2.11"
    assert library.span(["2.13", "2.11"]) == "2.11, 2.13"
    assert library.span(["2.13"]) == "2.13"


def test_a_process_has_one_engine() -> None:
    """Its state is in libringcomm.so alone, and not in part in the modules on top of it."""
    modules = [*library.FOLDER.glob("_C_torch*.so"), *library.FOLDER.glob("_planner*.so")]
    assert len(modules) >= 2
    for module in modules:
        assert not common_variables(library.FOLDER / "libringcomm.so", module), module


def test_no_library_looks_where_it_was_built() -> None:
    """Else a wheel would differ by the folder, and load what anybody puts there."""
    paths = set()
    for path in library.FOLDER.glob("*.so"):
        command = ["readelf", "-d", str(path)]
        dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        paths |= set(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic))
    assert paths == {"$ORIGIN"}


def test_options_load_the_library_and_other_names_do_not(python: Run) -> None:
    result = python("""if True:
        import sys, ringcomm
        try:
            ringcomm.Opt1ons
        except AttributeError as error:
            print(error)
        assert "ringcomm._C" not in sys.modules
        ringcomm.Options()
        assert "ringcomm._C" in sys.modules
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "module 'ringcomm' has no attribute 'Opt1ons'\n"


def test_every_way_to_name_it(python: Run) -> None:
    result = python(
        ONE_RANK
        + """if True:
        warnings.simplefilter("error")
        for name, cpu, cuda in (
            ("ringcomm", "ringcomm", "ringcomm" if torch.cuda.is_available() else None),
            ("cpu:ringcomm", "ringcomm", None),
            ("cpu:gloo,cuda:ringcomm", "gloo", "ringcomm"),
            ("cpu:ringcomm,cuda:ringcomm", "ringcomm", "ringcomm"),
        ):
            start(name)
            group = dist.group.WORLD
            assert group._get_backend(torch.device("cpu")).name() == cpu
            if cuda:
                assert group._get_backend(torch.device("cuda")).name() == cuda
            ones = torch.ones(3)
            dist.all_reduce(ones)
            assert ones.tolist() == [1, 1, 1]
            assert not group._has_hooks()  # asks the default backend: raises where there is none
            print(group.name())
            dist.destroy_process_group()
    """
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert set(result.stdout.split()) <= {"custom", "ringcomm"}, "a group has no default backend"


def test_cuda_is_named_where_there_is_a_device(python: Run) -> None:
    """Programs that want a device of the group's that is not the CPU use what they find here."""
    result = python(
        ONE_RANK
        + """if True:
        for count in (0, 1, 0):  # a torch with CUDA, on machines without and with a device
            torch.cuda.device_count = lambda: count
            start("ringcomm")
            print(*sorted(device.type for device in dist.group.WORLD._device_types))
            print(dist.BackendConfig(dist.Backend(dist.get_backend())))
            dist.destroy_process_group()
    """
    )
    assert result.returncode == 0, result.stderr
    without = ["cpu", "cpu:ringcomm"]
    both = ["cpu cuda", "cpu:ringcomm,cuda:ringcomm"]
    assert result.stdout.splitlines() == [*without, *both, *without]


def test_other_groups_are_as_torch_makes_them(python: Run) -> None:
    """One plug-in is enough for torch up to 2.13 to leave "cpu:gloo,cuda:gloo" undefined."""
    result = python(
        ONE_RANK
        + """if True:
        for name in ("gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"):
            start(name)
            print(dist.group.WORLD.name())
            dist.destroy_process_group()
    """,
        **ALONE,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["gloo", "gloo", "gloo"]


def test_a_variable_that_nobody_reads(python: Run) -> None:
    told = "ringcomm WARNING: unknown environment variable RINGCOMM_SPIN is ignored: did you mean "
    mistaken = {"RINGCOMM_SPIN": "0", "RINGCOMM_FLOWS": "1"}
    twice = ONE_RANK + "for _ in range(2): start('ringcomm'); dist.destroy_process_group()"
    assert python(twice, **mistaken).stderr.splitlines() == [told + "RINGCOMM_SPIN_US?"]
    assert python(twice, RINGCOMM_LOG="error", **mistaken).stderr == ""
