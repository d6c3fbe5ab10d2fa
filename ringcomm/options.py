"""Every setting of ringcomm, in one table.

From it come the attributes of `ringcomm.Options`, the environment variables, docs/options.md and
the types in _C.pyi. An attribute is called like its variable, without RINGCOMM_ and in small
letters: see _options.py.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

PREFIX = "RINGCOMM_"
SIMULATION = "RINGCOMM_SIM_"  # tests/sim
GROUP, PROCESS, PROGRAM, BUILD = "group", "process", "program", "build"
ALGORITHMS = (
    *("direct", "ring", "tree", "pairwise", "dissemination", "hierarchical", "doubling", "bruck"),
)
LEVELS = ("debug", "info", "warning", "error", "off")


@dataclass(frozen=True)
class Setting:
    """A row of the table: what one variable says.

    `scope` is "group" or "process" for the attributes of Options: each group may have its own
    value, or all groups of a process have one. The others are variables alone: of a "program" as
    a whole, or for the "build" and the tests. Numbers are from `least` to `most`, in `unit`s; the
    `choices` of one are words that stand for none.
    """

    name: str
    scope: str
    text: str  # for people, with Markdown's marks
    kind: type = str
    default: Any = ""
    fits: str = ""  # the default, for people, where it is no value
    unit: str = ""
    least: int = 0
    most: int = 0
    choices: tuple[str, ...] = ()
    pattern: str = ""  # of the whole text
    wrong: str = ""  # what an error says of a value that does not fit; "": the library checks it

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


SETTINGS = [
    Setting(
        *("algorithm", GROUP),
        "used wherever a collective has it, or [rules](by_hand.md#by-rules) for collectives and "
        "sizes; what rank 0 says holds for all. GPUs have [kernels](gpus.md#which-kernel)",
        default=None,
        fits="the [table](plans.md) chooses",
        choices=ALGORITHMS,
    ),
    Setting(
        *("spin_us", GROUP),
        "microseconds for which a call that waits keeps its core, before it sleeps",
        kind=int,
        default=None,
        fits="fits the host",
        unit="microseconds",
        most=1_000_000,
    ),
    Setting(
        *("cuda_mode", GROUP),
        "how CUDA tensors go. `ipc`: an error where ranks cannot map one another's memory; `host`: "
        "through the host's memory",
        default="auto",
        choices=("auto", "ipc", "host"),
        wrong=" is no way for CUDA tensors: use auto, ipc (an error where ranks cannot map one "
        "another's memory) or host",
    ),
    Setting(
        *("cuda_memory", GROUP),
        "bytes of its device that a rank gives the group",
        kind=int,
        default=None,
        fits="a 512th of the device's, 16 to 256 MiB",
        unit="bytes",
        least=1 << 18,
        most=1 << 40,
    ),
    Setting(
        *("shared_buffers", GROUP),
        "bytes of a rank's memory that other ranks of its host read, for [FSDP2's buffers]"
        "(performance.md#buffers-of-fsdp2); [on a GPU]"
        "(gpus.md#register-memory-once) any but 0 will do. The same on every rank",
        kind=int,
        default=0,
        unit="bytes",
        most=1 << 40,
    ),
    Setting(
        *("ifname", PROCESS),
        "[interfaces or networks](networks.md#which-addresses), as `eth0`, `10.0.0.0/8`, `^docker`",
        fits="all",
    ),
    Setting(*("ports", PROCESS), "where ranks listen: `40000-40015`, or one port", fits="any"),
    Setting(
        *("transport", PROCESS),
        "`tcp`: between ranks of one host too, for tests and comparisons",
        default="auto",
        choices=("auto", "tcp"),
        wrong=" is no transport: use auto, or tcp to have it inside a host too",
    ),
    Setting(
        *("flows", PROCESS),
        "TCP connections between two processes. `auto`: one more while it brings more than 5 %, "
        "[up to 8](networks.md#several-connections). The same on every rank",
        kind=int,
        default="auto",
        unit="connections",
        least=1,
        most=16,
        choices=("auto",),
    ),
    Setting(
        *("congestion", PROCESS),
        "TCP's congestion control, as `bbr`, of those in "
        "`sysctl net.ipv4.tcp_allowed_congestion_control`",
        fits="as the kernel is set",
    ),
    Setting(
        *("resume_seconds", PROCESS),
        "seconds for which a peer that does not answer is waited for",
        kind=int,
        default=30,
        unit="seconds",
        least=1,
        most=86_400,
    ),
    Setting(
        *("secret", PROCESS),
        "the [secret](safer.md#a-secret) of the job: only ranks that have "
        "the same can connect. In code a `pathlib.Path` is a file with it",
        fits="none",
    ),
    Setting(
        *("tls", PROCESS),
        "`on`: connections between hosts are [encrypted](safer.md#encryption), by the secret or by "
        "certificates",
        default="off",
        choices=("off", "on"),
        wrong=" is neither off nor on",
    ),
    Setting(*("tls_cert", PROCESS), "a file with this rank's certificate, and those between"),
    Setting(*("tls_key", PROCESS), "the file with the key of that certificate"),
    Setting(*("tls_ca", PROCESS), "a file with the authorities that sign the ranks' certificates"),
    Setting(
        *("costs", PROCESS),
        "a file of `ringcomm tune`, at rank 0: what messages [cost](networks.md#tuning) here",
        fits="none",
    ),
    Setting(
        *("host", PROCESS),
        "what that file calls this host, where hostnames change or are not unique",
        fits="the hostname",
        pattern=r"\S{0,64}",
        wrong=" is no name of a host: use one word of up to 64 characters",
    ),
    Setting(
        *("cuda_library", PROCESS),
        "the library for CUDA tensors, in place of the one that was built",
        fits="the one installed",
    ),
    Setting(
        *("log", PROCESS),
        "the least level of lines on stderr. `info` says what a group uses and why",
        default="warning",
        choices=LEVELS,
        wrong=" is not a level: use debug, info, warning, error or off",
    ),
    Setting(*("secret_file", PROGRAM), "a file whose first line is the secret; wins over it"),
    Setting(
        "as", PROGRAM, "`gloo`: groups that ask for [Gloo](clients.md) on the CPU get ringcomm"
    ),
    Setting(
        *("default", PROGRAM),
        "`cpu`, `cuda` or `cpu,cuda`: where groups that name no backend get ringcomm",
    ),
    Setting(
        *("elastic", PROGRAM),
        "where the store of an [elastic](elastic.md) world is: `host:port`, or several",
        fits="`MASTER_ADDR` and `MASTER_PORT`",
    ),
    Setting(
        *("elastic_run", PROGRAM),
        "the name of an elastic job, where several have one store",
        fits="`SLURM_JOB_ID`",
    ),
    Setting(
        *("trace", PROCESS),
        "the folder in which [flight records](trace.md) are kept, also of ranks that are killed. "
        "`off`: none is written, unless the program asks",
        fits="a temporary one, when something fails",
    ),
    Setting(
        *("trace_lines", GROUP),
        "`1`: flight records have the line of the program that called, for some microseconds more",
        default="0",
        choices=("0", "1"),
        wrong=" is neither 0 nor 1",
    ),
    Setting(
        *("metrics", PROCESS),
        "a file that is written each second, for Prometheus; `%r` in its name is the rank",
    ),
    Setting(
        *("strict", PROGRAM),
        "`1`: a variable of an unknown name is an error, in place of a warning",
        default="0",
        choices=("0", "1"),
        wrong=" is neither 0 nor 1",
    ),
    Setting("cuda", BUILD, "`on`, `off`, or `auto`: where torch has CUDA and `nvcc` is"),
    Setting("cuda_archs", BUILD, "GPU architectures, as `80;90`"),
    Setting("sanitize", BUILD, "`address`, `thread` or `undefined`"),
    Setting("werror", BUILD, "`1`: warnings are errors"),
    Setting("wheel", BUILD, "`1`: for machines that may have other libraries"),
    Setting("test_level", BUILD, "tests: `fast`, `sample`, `all` or `soak`"),
    Setting("sample_seconds", BUILD, "tests: how long a sample of long forms takes: 900"),
    Setting("seed", BUILD, "tests: what samples are drawn with"),
]
BY_NAME = {setting.name: setting for setting in SETTINGS}
ATTRIBUTES = {name: one for name, one in BY_NAME.items() if one.scope in (GROUP, PROCESS)}
VARIABLES = [setting.variable for setting in SETTINGS]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return that of `names` which somebody who wrote `name` may have meant."""
    return difflib.get_close_matches(name, names, 1, 0)[0]


def unknown_variables() -> Iterator[tuple[str, str]]:
    """Those of the environment that nobody reads, each with the nearest that somebody does."""
    for name in os.environ:
        ours = name.startswith(PREFIX) and not name.startswith(SIMULATION)
        if ours and name not in VARIABLES:
            yield name, nearest(name, VARIABLES)


def check_variables() -> None:
    """With RINGCOMM_STRICT=1, raise ValueError where a variable is unknown."""
    if BY_NAME["strict"].read() != "1":
        return
    for name, meant in unknown_variables():
        raise ValueError(f"unknown environment variable {name}: did you mean {meant}?")
