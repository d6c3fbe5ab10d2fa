"""The attributes of `ringcomm.Options`, made of the table in options.py.

What code says wins over the variable, and the variable over the default. Variables are read when
Options are made; init_process_group makes some where none are given. A process has one network and
one log: its first group sets them, and the variables of these are not read again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import select
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from ringcomm._runtime import (
    addresses,  # now, not when a group meets: files may be out of reach then
)
from ringcomm.options import ATTRIBUTES, LEVELS, PROCESS, Setting, nearest

NUMBERED = {"log": LEVELS, "flows": ("auto",)}  # words that are numbers in the library, from 0 on
OBSERVING = ("log", "metrics", "trace")  # settings that end no job
_configured: Any = None  # the Options of this process's first group


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
    """Return what asks for algorithms; `@FILE` is a file with a rule a line, and `#` comments."""
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


def get(options: Any, name: str) -> Any:
    value = getattr(options._config, name)
    words = NUMBERED.get(name, ())
    return words[value] if words and value < len(words) else value


def put(config: Any, name: str, value: Any) -> None:
    words = NUMBERED.get(name, ())
    if name == "algorithm" and value:
        value = rules_in(value)
    setattr(config, name, words.index(value) if value in words else value)


def reset(options: Any, setting: Setting) -> None:
    """Give the options what the process has, or else what the variable says."""
    if setting.scope == PROCESS and _configured is not None:
        value = get(_configured, setting.name)
    elif setting.name == "secret" and (path := os.environ.get("RINGCOMM_SECRET_FILE")):
        value = secret_in(Path(path), f"RINGCOMM_SECRET_FILE={path}")
    else:
        value = setting.read()
    put(options._config, setting.name, value)
    options._given = options._given - {setting.name}


def give(options: Any, setting: Setting, value: Any) -> None:
    """Set an attribute; None takes back what code has said. Raises TypeError, ValueError."""
    name = setting.name
    if value is None:
        return reset(options, setting)
    said = f"{name}={value}"
    if name == "secret":
        said = f"secret={value}" if isinstance(value, Path) else "secret"
        value = secret_in(value.expanduser(), said) if isinstance(value, Path) else value
    setting.check(value, said)
    trial = type(options._config)()
    try:
        put(trial, name, value)
        trial.check()  # what has a grammar
        check_addresses(name, value)
    except ValueError as error:
        raise ValueError(str(error).replace(f"{setting.variable}=", f"{name}=")) from None
    put(options._config, name, value)
    options._given = options._given | {name}
    return None


def check_tls(config: Any) -> None:
    """Raise ValueError where the settings of encryption do not fit together."""
    files = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    given = [f"RINGCOMM_{name.upper()}" for name, file in files.items() if file]
    lacking = [f"RINGCOMM_{name.upper()}" for name, file in files.items() if not file]
    if given and config.tls != "on":
        raise ValueError(f"{given[0]} is set and RINGCOMM_TLS is off: nothing would be encrypted")
    if given and lacking:
        raise ValueError(f"{given[0]} needs {' and '.join(lacking)}, too")
    if given:
        secret_in(Path(config.tls_key), f"RINGCOMM_TLS_KEY={config.tls_key}")
    elif config.tls == "on" and not config.secret:
        raise ValueError(
            "RINGCOMM_TLS=on needs a key: set RINGCOMM_SECRET_FILE, or RINGCOMM_TLS_CERT, "
            "RINGCOMM_TLS_KEY and RINGCOMM_TLS_CA"
        )


def check_addresses(name: str, value: Any) -> None:
    """Raise ValueError for an interface or port that the library could not read later."""
    if name in addresses.GRAMMAR:
        addresses.GRAMMAR[name](value)


CENTURY = timedelta(days=36525)


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


def complete(kind: Any) -> None:
    """Give the class `ringcomm._C.Options` the attributes of the table; the library calls this."""
    make = kind.__init__

    def initialize(self: Any, *timeout: Any, **given: Any) -> None:
        ours = {name: given.pop(name) for name in list(given) if name in ATTRIBUTES}
        for name in given.keys() - {"timeout"}:
            meant = nearest(name, [*ATTRIBUTES, "timeout"])
            raise TypeError(f"ringcomm.Options has no {name!r}: did you mean {meant!r}?")
        make(
            self,
            *map(checked_timeout, timeout),
            **{name: checked_timeout(value) for name, value in given.items()},  # it is the timeout
        )
        for setting in ATTRIBUTES.values():
            if ours.get(setting.name) is None:
                reset(self, setting)
            else:
                give(self, setting, ours[setting.name])

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if type(self) is kind and not hasattr(kind, name):
            meant = nearest(name, [*ATTRIBUTES, "_timeout"])
            raise AttributeError(f"ringcomm.Options has no {name!r}: did you mean {meant!r}?")
        if name == "_timeout":
            value = checked_timeout(value)
        object.__setattr__(self, name, value)

    def show(self: Any) -> str:
        values = {name: get(self, name) for name in ATTRIBUTES if name in self._given}
        values |= {"secret": "..."} if "secret" in values else {}
        words = [f"timeout={self._timeout!r}", *(f"{k}={v!r}" for k, v in values.items())]
        return f"ringcomm.Options({', '.join(words)})"

    kind.__init__ = initialize
    kind.__setattr__ = set_attribute
    kind.__repr__ = show
    for setting in ATTRIBUTES.values():
        getter = functools.partial(get, name=setting.name)
        setter = functools.partial(_give_by_name, setting)
        setattr(kind, setting.name, property(getter, setter, doc=setting.text))


def _give_by_name(setting: Setting, options: Any, value: Any) -> None:
    give(options, setting, value)


# ---- the process


def configure(options: Any, run: str | None = None) -> None:
    """Set what is the process's, for its first group; compare a later group's options with it.

    `run` is what flight records call the job, if not what its launcher does: of an elastic world,
    several launchers may have started the ranks. Raises ValueError where the options say something
    else about the process.
    """
    global _configured
    from ringcomm import _C

    if _configured is not None:
        _compare(options, _configured, except_for="resume_seconds" if run else "")
        if not run:
            return
    configured = copy.copy(options if _configured is None else _configured)
    config = configured._config
    config.resume_seconds = options._config.resume_seconds
    launched = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RUN_ID", "RESTART_COUNT"))
    name, restart = launched
    config.run = run or f"{name or 'none'}/{restart or '0'}"
    check_tls(config)
    config.cuda_connections = connections(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or "8")
    given = copy.copy(configured)
    if sys.__stderr__ is None:  # its number may be that of any other file by now
        put(given._config, "log", "off")
    _C.configure(given._config)
    _configured = configured


def of_some(parent: Any, ranks: list[int], asked: Any) -> Any:
    """Return the options of a group of some of a group's ranks; the library calls this.

    `asked` is what torch gives, which may be another backend's. Raises ValueError.
    """
    made = copy.copy(parent)
    made._links = made._check_members = None
    made.enable_reconfigure = False
    if isinstance(asked, type(parent)):
        configure(asked)
        made._config, made._given = asked._config, asked._given
    made._timeout = asked._timeout
    world = parent.global_ranks_in_group  # none: the default group
    made.global_ranks_in_group = [world[rank] if rank < len(world) else rank for rank in ranks]
    return made


def connections(text: str) -> int:
    """Return the number that a text begins with, as CUDA reads its own variable; else 0."""
    found = re.match(r"\s*[+-]?[0-9]{1,9}", text)
    return int(found[0]) if found else 0


def _compare(options: Any, configured: Any, except_for: str) -> None:
    for name in sorted(options._given - {except_for}):
        if ATTRIBUTES[name].scope == PROCESS and get(options, name) != get(configured, name):
            wanted, is_now = f"{name}={get(options, name)}", f"{name}={get(configured, name)}"
            if name == "secret":
                wanted, is_now = "another secret", "its own"
            if name in OBSERVING:
                warn(f"a group asks for {wanted}, and this process keeps {is_now}")
                continue
            raise ValueError(
                f"a group asks for {wanted}, and the first group of this process has set {is_now}: "
                "give all groups of a process the same"
            )


def of_process(name: str) -> Any:
    """Return what holds in this process: what code has said, else the variable."""
    return ATTRIBUTES[name].read() if _configured is None else get(_configured, name)


def log_level() -> str | None:
    """What code has said about the lines on stderr, else RINGCOMM_LOG; None: nothing."""
    if _configured is not None and "log" in _configured._given:
        return str(get(_configured, "log"))
    return os.environ.get("RINGCOMM_LOG")


def warn(text: str) -> None:
    """Write a line to stderr, as the library warns; never raises."""
    if log_level() not in ("error", "off"):
        say(f"WARNING: {text}")


def say(text: str) -> None:
    """Write a line to stderr. It never raises, nor waits for a reader that has stopped."""
    # One call, so that lines of several ranks do not mix. Their reader may have gone.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr is sys.__stderr__:  # else it is something of the program's
            poll = select.poll()
            poll.register(sys.stderr.fileno(), select.POLLOUT)
            if [event for _, event in poll.poll(100)] != [select.POLLOUT]:
                return
        sys.stderr.write(f"ringcomm {text}\n")


def _forget() -> None:
    global _configured
    _configured = None  # a forked child makes groups, and a network, of its own


os.register_at_fork(after_in_child=_forget)
