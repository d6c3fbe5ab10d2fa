"""Every setting of ringcomm, in one table: the class bodies of `Attributes` and `Variables`.

From it come `ringcomm.Options` (ringcomm/_runtime/options.py), the environment variables and
docs/options.md. An attribute is called like its variable, without RINGCOMM_ and in small letters.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

if TYPE_CHECKING:  # importing it takes longer than all else here
    from typing_extensions import Self, dataclass_transform
else:

    def dataclass_transform(**_told: Any) -> Any:
        return lambda decorator: decorator


T = TypeVar("T")
PREFIX = "RINGCOMM_"
SIMULATION = "RINGCOMM_SIM_"  # tests/sim
GROUP, PROCESS, PROGRAM, BUILD = "group", "process", "program", "build"
NETWORK, RANK_0 = "network", "rank 0"
ALGORITHMS = (
    *("direct", "ring", "tree", "pairwise", "dissemination", "hierarchical", "doubling", "bruck"),
)
LEVELS = ("debug", "info", "warning", "error", "off")
CENTURY = timedelta(days=36525)


@dataclass(eq=False)
class Setting(Generic[T]):
    """A row of the table: what one variable says, and the attribute of Options of that name.

    `scope` is "group" or "process" for the attributes of Options: each group may have its own
    value, or all groups of a process have one. The others are variables alone: of a "program" as
    a whole, or for the "build" and the tests. Numbers are from `least` to `most`, in `unit`s; a
    number's `choices` are words that stand for none. `alike` says which ranks of a group
    need the same value: all if they connect over a NETWORK, or all that have any,
    which RANK_0 must have, too. The docstring below a row is for people.
    """

    scope: str
    kind: type = str
    default: Any = ""
    fits: str = ""  # the default, for people, where it is no value
    unit: str = ""
    least: int = 0
    most: int = 0
    choices: tuple[str, ...] = ()
    numbered: bool = False  # the library has the choices as numbers, from 0 on
    pattern: str = ""  # matches the whole text
    wrong: str = ""  # error text for a value that does not fit; "": the library checks it
    alike: str = ""
    name: str = field(default="", init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name.rstrip("_")

    @overload
    def __get__(self, options: None, owner: type) -> Self: ...

    @overload
    def __get__(self, options: Any, owner: type) -> T: ...

    def __get__(self, options: Any, owner: type) -> Any:
        if options is None:
            return self
        value = getattr(options._config, self.name)
        return self.choices[value] if self._is_a_choice(value) else value

    def __set__(self, options: Any, value: T | None) -> None:
        options._give(self, value)

    def _is_a_choice(self, value: Any) -> bool:
        return self.numbered and isinstance(value, int) and value < len(self.choices)

    def put(self, config: Any, value: Any) -> None:
        """Give the library a value that was checked."""
        numbered = self.numbered and value in self.choices
        setattr(config, self.name, self.choices.index(value) if numbered else value)

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def check(self, value: Any, said: str) -> Any:
        """Return the value, where it can be one of this setting's.

        `said` begins the error: "flows=99". Raises TypeError for another type, and ValueError for
        a value out of the range or of the choices.
        """
        if self.kind is int and value in self.choices:
            return value
        if not isinstance(value, self.kind) or isinstance(value, bool):
            wanted = self.kind.__name__
            raise TypeError(f"{said}: {self.name} is of type {wanted}, not {type(value).__name__}")
        if isinstance(value, int) and not self.least <= value <= self.most:
            raise ValueError(f"{said} is not {self.range}")
        fits = re.fullmatch(self.pattern, str(value)) if self.pattern else value in self.choices
        if self.wrong and not fits:
            raise ValueError(said + self.wrong)
        return value

    @property
    def range(self) -> str:
        words = "".join(f", or {word}" for word in self.choices)
        return f"a number of {self.unit} from {self.least} to {self.most}{words}"

    def read(self) -> Any:
        """Return what the variable says, else the default. Raises ValueError."""
        text = os.environ.get(self.variable)
        if not text:
            return self.default
        said = f"{self.variable}={text}"
        if self.kind is not int or text in self.choices:
            return self.check(text, said)
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError(f"{said} is not {self.range}")
        return self.check(int(text), said)


class Secret(Setting[str]):
    """The one setting that may stand in a file: a Path in code, RINGCOMM_SECRET_FILE outside."""

    def __set__(self, options: Any, value: str | Path | None) -> None:
        options._give(self, value)

    def check(self, value: Any, said: str) -> Any:
        if isinstance(value, Path):
            return secret_in(value.expanduser(), said)
        return super().check(value, self.name)  # no error shows it

    def read(self) -> Any:
        return secret_of(os.environ)


class Rules(Setting[str | None]):
    """The algorithms that are asked for; `@FILE` is a file with a rule a line."""

    def put(self, config: Any, value: Any) -> None:
        super().put(config, rules_in(value) if value else value)


def _argument(*, default: Any, kw_only: bool) -> Any:
    """Stand for an argument of Options that is no setting."""
    del kw_only
    return default


@dataclass_transform(kw_only_default=True, field_specifiers=(Setting, Secret, Rules, _argument))
def _arguments(kind: type[T]) -> type[T]:
    """Tell type checkers that the rows of the class are keyword arguments."""
    return kind


@_arguments
class Attributes:
    """The attributes of `ringcomm.Options`."""

    if TYPE_CHECKING:
        timeout: InitVar[timedelta] = _argument(default=timedelta(), kw_only=False)

    algorithm: Rules = Rules(
        GROUP,
        default=None,
        fits="the [table](plans.md) chooses",
        choices=ALGORITHMS,
        alike=RANK_0,
    )
    """One algorithm, used wherever a collective has it, or [rules](by_hand.md#by-rules) by
    collective and size. Rank 0 decides for all. On GPUs it names [kernels](gpus.md).
    """
    spin_us: Setting[int | None] = Setting(
        GROUP, kind=int, default=None, fits="fits the host", unit="microseconds", most=1_000_000
    )
    """How many microseconds a waiting call keeps its core busy before it sleeps."""
    threads: Setting[int | str] = Setting(
        GROUP,
        kind=int,
        default="auto",
        unit="threads",
        least=1,
        most=64,
        choices=("auto",),
        numbered=True,
    )
    """How many threads of a rank copy and sum a long message. `auto` takes its share of the cores,
    up to 8, and a quarter of that beside your computation. It follows affinity and cgroup quota.
    """
    cuda_mode: Setting[str] = Setting(
        GROUP,
        default="auto",
        choices=("auto", "ipc", "host"),
        wrong=" is no way for CUDA tensors: use auto, ipc (an error where ranks cannot map one "
        "another's memory) or host",
    )
    """How CUDA tensors travel. `ipc` raises an error if ranks can't map one another's memory;
    `host` goes through the host's memory.
    """
    cuda_memory: Setting[int | None] = Setting(
        GROUP,
        kind=int,
        default=None,
        fits="a 512th of the device's, 16 to 256 MiB",
        unit="bytes",
        least=1 << 18,
        most=1 << 40,
    )
    """How many bytes of device memory each rank gives the group."""
    cuda_blocks: Setting[int] = Setting(
        GROUP, kind=int, default=16, unit="blocks", least=8, most=64
    )
    """On how many multiprocessors, at most, the group's [kernels](gpus.md#which-kernel) run while
    your own do. If a GPU has too few left, the group's streams hand over instead.
    """
    shared_buffers: Setting[int | None] = Setting(
        GROUP, kind=int, default=None, fits="as many as are asked for", unit="bytes", most=1 << 40
    )
    """How many bytes of tensors, at most, a rank puts where the other ranks of its host
    [can read them](performance.md#buffers-of-ddp-and-fsdp2); 0 turns that off. On a GPU any number
    but 0 turns it on.
    """
    ifname: Setting[str] = Setting(PROCESS, default="", fits="all")
    """Which [interfaces or networks](networks.md#which-addresses) to use, such as `eth0`,
    `10.0.0.0/8` or `^docker`.
    """
    ports: Setting[str] = Setting(PROCESS, default="", fits="any")
    """The [ports](networks.md#which-ports) where ranks listen: `40000-40015`, or a single one."""
    transport: Setting[str] = Setting(
        PROCESS,
        default="auto",
        choices=("auto", "tcp"),
        wrong=" is no transport: use auto, or tcp to have it inside a host too",
    )
    """`tcp` uses TCP inside a host as well, for tests and comparisons."""
    flows: Setting[int | str] = Setting(
        PROCESS,
        kind=int,
        default="auto",
        unit="connections",
        least=1,
        most=16,
        choices=("auto",),
        numbered=True,
        alike=NETWORK,
    )
    """The number of TCP connections between two processes. `auto` adds one while that brings more
    than 5 %, [up to 8](networks.md#several-connections). Must be the same on every rank.
    """
    congestion: Setting[str] = Setting(PROCESS, default="", fits="as the kernel is set")
    """TCP's congestion control, such as `bbr`; `sysctl net.ipv4.tcp_allowed_congestion_control`
    lists the choices.
    """
    resume_seconds: Setting[int] = Setting(
        PROCESS, kind=int, default=30, unit="seconds", least=1, most=86_400
    )
    """How many seconds to wait for a peer that doesn't answer."""
    secret: Secret = Secret(PROCESS, default="", fits="none", alike=NETWORK)
    """The job's [secret](security.md#a-secret): only ranks with the same one can connect. In code,
    a `pathlib.Path` names a file that holds it.
    """
    tls: Setting[str] = Setting(
        PROCESS,
        default="off",
        choices=("off", "on"),
        wrong=" is neither off nor on",
        alike=NETWORK,
    )
    """`on` [encrypts](security.md#encryption) connections between hosts, with the secret or with
    certificates.
    """
    tls_cert: Setting[str] = Setting(PROCESS, default="")
    """The file with this rank's certificate, followed by any intermediate ones."""
    tls_key: Setting[str] = Setting(PROCESS, default="")
    """The file with that certificate's private key."""
    tls_ca: Setting[str] = Setting(PROCESS, default="")
    """The file with the authorities that sign the ranks' certificates."""
    costs: Setting[str] = Setting(PROCESS, default="", fits="none")
    """The file that [`ringcomm tune`](networks.md#tuning) wrote. Only rank 0 needs it."""
    host: Setting[str] = Setting(
        PROCESS,
        default="",
        fits="the hostname",
        pattern=r"\S{0,64}",
        wrong=" is no name of a host: use one word of up to 64 characters",
    )
    """This host's name in that file, if hostnames change or aren't unique."""
    cuda_library: Setting[str] = Setting(PROCESS, default="", fits="the one installed")
    """Another library for CUDA tensors than the one that was built."""
    log: Setting[str] = Setting(
        PROCESS,
        default="warning",
        choices=LEVELS,
        wrong=" is not a level: use debug, info, warning, error or off",
        numbered=True,
    )
    """The lowest level that is logged to stderr. `info` tells you what a group uses, and why."""
    trace: Setting[str] = Setting(PROCESS, default="", fits="a temporary one, if something fails")
    """The folder for [flight records](trace.md), which then survive even if ranks are killed. `off`
    writes none unless your program asks.
    """
    trace_lines: Setting[str] = Setting(
        GROUP, default="0", choices=("0", "1"), wrong=" is neither 0 nor 1"
    )
    """`1` records the line of your program that made each call, which takes some microseconds."""
    metrics: Setting[str] = Setting(PROCESS, default="")
    """A file for Prometheus, written every second; `%r` in its name becomes the rank."""


class Variables:
    """Variables alone: programs that do not name ringcomm, or tools, read them."""

    secret_file = Setting[str](PROGRAM)
    """A file whose first line is the secret; it wins over `RINGCOMM_SECRET`."""
    as_ = Setting[str](PROGRAM)
    """With `gloo`, groups that ask for [Gloo](clients.md) on the CPU get ringcomm."""
    default = Setting[str](PROGRAM)
    """`cpu`, `cuda` or `cpu,cuda`: the devices for which ringcomm is the default backend."""
    elastic = Setting[str](PROGRAM, fits="`MASTER_ADDR` and `MASTER_PORT`")
    """Where the store of an [elastic](elastic.md#the-store) world is: `host:port`, or several."""
    elastic_run = Setting[str](PROGRAM, fits="`SLURM_JOB_ID`")
    """The name of an elastic job, if several share a store."""
    elastic_journal = Setting[str](PROGRAM)
    """A folder for what each rank of an elastic job does; `ringcomm elastic rehearse` sets it."""
    elastic_prometheus = Setting[str](PROGRAM)
    """A file for Prometheus, which rank 0 of an [elastic](elastic.md#see-what-happens) world writes
    every second.
    """
    elastic_copy_steps = Setting[int | str](
        PROGRAM, kind=int, default="auto", unit="steps", most=1_000_000, choices=("auto",)
    )
    """After how many steps the [last unit](elastic.md#the-last-unit) of a sharded world copies each
    shard into the memory of another rank. `auto`: as often as takes a 20th of the time at most; 0:
    never, on any rank. Ranks that differ copy after the steps that all of them choose.
    """
    strict = Setting[str](PROGRAM, default="0", choices=("0", "1"), wrong=" is neither 0 nor 1")
    """`1` turns the warning about an unknown variable into an error."""
    cuda = Setting[str](BUILD)
    """`on`, `off`, or `auto`: build for CUDA tensors if torch has CUDA and `nvcc` is there."""
    cuda_archs = Setting[str](BUILD)
    """GPU architectures, such as `80;90`."""
    sanitize = Setting[str](BUILD)
    """A sanitizer: `address`, `thread` or `undefined`."""
    werror = Setting[str](BUILD)
    """`1` turns compiler warnings into errors."""
    test_level = Setting[str](BUILD)
    """Which tests run: `fast`, `sample`, `all` or `soak`."""
    sample_seconds = Setting[str](BUILD)
    """How many seconds a sample of the long tests takes; default: 900."""
    seed = Setting[str](BUILD)
    """The seed with which that sample is drawn."""
    pytorch = Setting[str](BUILD)
    """A checkout of PyTorch, whose own [tests](coming-from-gloo.md) of backends then run."""


ATTRIBUTES = {row.name: row for row in vars(Attributes).values() if isinstance(row, Setting)}
SETTINGS = [*ATTRIBUTES.values(), *(r for r in vars(Variables).values() if isinstance(r, Setting))]
VARIABLES = [setting.variable for setting in SETTINGS]


def secret_of(environ: Mapping[str, str]) -> str:
    """Return the secret that variables give, by a file or by itself. Raises ValueError."""
    path = environ.get("RINGCOMM_SECRET_FILE")
    if path:
        return secret_in(Path(path).expanduser(), f"RINGCOMM_SECRET_FILE={path}")
    return environ.get("RINGCOMM_SECRET", "")


def secret_in(path: Path, said: str) -> str:
    """Return the first line of a file that its owner alone can read. Raises ValueError."""
    try:
        open_to_others = path.stat().st_mode & 0o077
        secret = path.read_text().partition("\n")[0]
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"{said} cannot be read") from None
    if open_to_others:
        raise ValueError(f"{said} can be read by others: chmod 600 it")
    if not secret:
        raise ValueError(f"{said} is empty")
    return secret


def rules_in(text: str) -> str:
    """Return what asks for algorithms; in a file, comments begin with `#`. Raises ValueError."""
    if not text.startswith("@"):
        return text
    try:
        lines = Path(text[1:]).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"RINGCOMM_ALGORITHM={text} cannot be read") from None
    rules = [line.partition("#")[0].replace(" ", "") for line in lines]
    if not any(lines):  # comments alone say that nothing is asked for
        raise ValueError(f"RINGCOMM_ALGORITHM={text} has no rule")
    return ",".join(filter(None, rules))


def checked_timeout(timeout: timedelta) -> timedelta:
    """Return a timeout that torch can count; ValueError: it is over before it begins.

    torch counts microseconds in 64 bits, and makes a negative number of timedelta.max. As in
    csrc/torch/options.h, a century stands for all that is longer.
    """
    if timeout <= timedelta(0):
        raise ValueError(
            f"ringcomm: a timeout of {timeout / timedelta(milliseconds=1):.0f} ms is over before "
            "anything can happen: give a positive one, or datetime.timedelta.max to wait for as "
            "long as it takes"
        )
    return min(timeout, CENTURY)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return that of `names` which somebody who wrote `name` may have meant."""
    return difflib.get_close_matches(name, names, 1, 0)[0]


def unknown_variables(names: Iterable[str] = os.environ) -> Iterator[tuple[str, str]]:
    """Return variables that have no meaning, each with the nearest that has one."""
    for name in names:
        ours = name.startswith(PREFIX) and not name.startswith(SIMULATION)
        if ours and name not in VARIABLES:
            yield name, nearest(name, VARIABLES)


def check_variables() -> None:
    """With RINGCOMM_STRICT=1, raise ValueError where a variable is unknown."""
    if Variables.strict.read() != "1":
        return
    for name, meant in unknown_variables():
        raise ValueError(f"unknown environment variable {name}: did you mean {meant}?")
