"""The package as users meet it: found by torch without an import, loaded late, never in the way."""

from importlib.metadata import distribution, entry_points

import pytest
from conftest import Run

GROUPS = ["torch.backends", "torch.distributed.backends"]

# One rank needs no peer: a store in memory, and no launcher.
ONE_RANK = """
import datetime, sys, warnings
import torch, torch.distributed as dist
def start(name):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1,
                            timeout=datetime.timedelta(seconds=20))
"""


def torch_minor() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@pytest.mark.parametrize("group", GROUPS)
def test_torch_finds_the_entry_point(group: str) -> None:
    ours = [entry for entry in entry_points(group=group) if entry.name == "ringcomm"]
    assert [entry.value for entry in ours] == ["ringcomm._autoload:register"]
    ours[0].load()


def test_the_version_is_one() -> None:
    import ringcomm

    assert distribution("ringcomm").version == ringcomm.__version__


def test_available_without_an_import(python: Run) -> None:
    result = python("""if True:
        import sys, torch, torch.distributed as dist
        assert dist.is_backend_available("ringcomm")
        assert dist.Backend.backend_capability["ringcomm"] == ["cpu", "cuda"]
        assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
        assert "ringcomm._C" not in sys.modules, "the library was loaded by `import torch`"
        assert "ringcomm/_C" not in open("/proc/self/maps").read()
    """)
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


@pytest.mark.parametrize("first", ["torch", "ringcomm", "ringcomm._autoload"])
def test_any_order_of_imports(python: Run, first: str) -> None:
    result = python(f"""if True:
        import {first}
        import torch, ringcomm
        assert torch.distributed.is_backend_available("ringcomm")
    """)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_registering_again_changes_nothing(python: Run) -> None:
    result = python("""if True:
        import torch.distributed.distributed_c10d as c10d
        from ringcomm._autoload import register
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


@pytest.mark.parametrize(
    ("recorded", "value", "words"),
    [
        ("torch", "2.9.1+cpu", "was built for torch 2.9 but torch {torch} is running"),
        ("torch", "2.99.0", "was built for torch 2.99 but torch {torch} is running"),
        ("python", "3.7", "was built for Python 3.7 but Python {python} is running"),
    ],
)
def test_a_library_of_another_version_is_refused_before_it_is_loaded(
    python: Run, recorded: str, value: str, words: str
) -> None:
    result = python(
        ONE_RANK
        + f"""if True:
        import ringcomm._build_info
        ringcomm._build_info.{recorded} = "{value}"
        try:
            start("ringcomm")
        except ImportError as error:
            print(error)
        assert "ringcomm._C" not in sys.modules
        assert "ringcomm/_C" not in open("/proc/self/maps").read()
        print("%d.%d" % sys.version_info[:2], ".".join(torch.__version__.split(".")[:2]))
    """
    )
    assert result.returncode == 0, result.stderr
    message, versions = result.stdout.splitlines()
    running = dict(zip(["python", "torch"], versions.split(), strict=True))
    assert words.format(**running) in message
    assert "rebuild it with `pip install --no-build-isolation --force-reinstall" in message


def test_what_is_not_built_says_so(python: Run) -> None:
    result = python("""if True:
        import sys, ringcomm
        sys.modules["ringcomm._build_info"] = None  # as when the file is not there
        try:
            ringcomm.Options
        except ImportError as error:
            print(error)
    """)
    assert result.stdout.startswith("ringcomm is not built: run `pip install"), result.stderr


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


@pytest.mark.parametrize(
    "name",
    ["ringcomm", "cpu:ringcomm", "cpu:gloo,cuda:ringcomm", "cpu:ringcomm,cuda:ringcomm"],
)
def test_every_way_to_name_it(python: Run, name: str) -> None:
    result = python(
        ONE_RANK
        + f"""if True:
        warnings.simplefilter("error")
        start("{name}")
        group = dist.group.WORLD
        if "ringcomm" in "{name}".split(",")[0]:
            assert group._get_backend(torch.device("cpu")).name() == "ringcomm"
        if "cuda" in "{name}":
            assert group._get_backend(torch.device("cuda")).name() == "ringcomm"
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
    assert result.stdout.strip() in {"custom", "ringcomm"}, "no default backend"


@pytest.mark.skipif(torch_minor() >= (2, 14), reason="torch leaves no group undefined any more")
def test_other_groups_are_left_as_torch_makes_them(python: Run) -> None:
    source = ONE_RANK + """if True:
        start("cpu:gloo,cuda:gloo")
        print(dist.group.WORLD.name())
        dist.destroy_process_group()
    """
    alone = python("import torch.distributed as d; d.Backend._plugins.clear()\n" + source)
    beside = python(source)
    assert alone.returncode == beside.returncode == 0, alone.stderr + beside.stderr
    assert beside.stdout == alone.stdout
