"""`ringcomm.Options`, made of the table in ringcomm/options.py, and what they set in a process.

What code says wins over the variable, and the variable over the default. Variables are read when
Options are made; init_process_group makes some where none are given. A process has one network and
one log: its first group sets them, and the variables of these are not read again.
"""

from __future__ import annotations

import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringcomm._runtime import (
    addresses,  # now, not when a group meets: files may be out of reach then
    process,
)
from ringcomm._runtime.library import load_library
from ringcomm.options import (
    ATTRIBUTES,
    PROCESS,
    Attributes,
    Setting,
    checked_timeout,
    nearest,
    secret_in,
)

load_library()  # which says what is wrong with it, where the import would crash
from ringcomm import _C  # noqa: E402

OBSERVING = ("log", "metrics", "trace")  # settings that end no job


class Options(Attributes, _C.Options):
    """Options of a group: `init_process_group("ringcomm", pg_options=Options())`.

    `timeout` is how long an operation waits for a rank; that of `init_process_group` wins. Each
    other argument is an attribute, too, and None takes back what code has said. Code wins over the
    environment variable, and that over the default. Raises ValueError for a value that cannot be,
    and TypeError for a wrong type or an unknown keyword.
    """

    if not TYPE_CHECKING:  # they make the first of the table, and check names themselves

        def __init__(self, timeout: timedelta | None = None, **given: Any) -> None:
            for name in given.keys() - ATTRIBUTES.keys():
                meant = nearest(name, [*ATTRIBUTES, "timeout"])
                raise TypeError(f"ringcomm.Options has no {name!r}: did you mean {meant!r}?")
            _C.Options.__init__(self, *([] if timeout is None else [checked_timeout(timeout)]))
            for setting in ATTRIBUTES.values():
                self._give(setting, given.get(setting.name))

        def __setattr__(self, name: str, value: Any) -> None:
            if type(self) is Options and not hasattr(Options, name):
                meant = nearest(name, [*ATTRIBUTES, "_timeout"])
                raise AttributeError(f"ringcomm.Options has no {name!r}: did you mean {meant!r}?")
            super().__setattr__(name, checked_timeout(value) if name == "_timeout" else value)

    @classmethod
    def _of(cls, others: _C.Options) -> Options:
        """Return a copy of options, which the library may have made."""
        made = cls.__new__(cls)
        _C.Options.__init__(made, others)
        return made

    def __copy__(self) -> Options:
        return Options._of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:
        return Options._of(self)

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in ATTRIBUTES if name in self._given}
        values |= {"secret": "..."} if "secret" in values else {}
        words = [f"timeout={self._timeout!r}", *(f"{k}={v!r}" for k, v in values.items())]
        return f"ringcomm.Options({', '.join(words)})"

    def _give(self, setting: Setting[Any], value: Any) -> None:
        """Set an attribute; None takes back what code has said. Raises TypeError, ValueError."""
        name = setting.name
        if value is None:
            kept = setting.scope == PROCESS and process.configured is not None
            setting.put(self._config, process.setting(name) if kept else setting.read())
            self._given -= {name}
            return
        value = setting.check(value, f"{name}={value}")
        trial = _C.Config()
        try:
            setting.put(trial, value)
            trial.check()  # what has a grammar
            if name in addresses.GRAMMAR:  # else the library could not read it later
                addresses.GRAMMAR[name](value)
        except ValueError as error:
            raise ValueError(str(error).replace(f"{setting.variable}=", f"{name}=")) from None
        setting.put(self._config, value)
        self._given |= {name}


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


def configure(options: Options, run: str | None = None) -> None:
    """Set what is the process's, for its first group; compare a later group's options with it.

    `run` is what flight records call the job, if not what its launcher does: of an elastic world,
    several launchers may have started the ranks. Raises ValueError where the options say something
    else about the process.
    """
    if process.configured is not None:
        _compare(options, process.configured, except_for="resume_seconds" if run else "")
        if not run:
            return
    configured = Options._of(options if process.configured is None else process.configured)
    config = configured._config
    config.resume_seconds = options._config.resume_seconds
    launched = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RUN_ID", "RESTART_COUNT"))
    name, restart = launched
    config.run = run or f"{name or 'none'}/{restart or '0'}"
    check_tls(config)
    config.cuda_connections = connections(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or "8")
    given = Options._of(configured)._config
    if sys.__stderr__ is None:  # its number may be that of any other file by now
        ATTRIBUTES["log"].put(given, "off")
    _C.configure(given)
    process.configured = configured


def of_some(parent: _C.Options, ranks: list[int], asked: Any) -> Options:
    """Return the options of a group of some of a group's ranks; the library calls this.

    `asked` is what torch gives, which may be another backend's. Raises ValueError.
    """
    made = Options._of(parent)
    made._links = made._check_members = None
    made.enable_reconfigure = False
    if isinstance(asked, _C.Options):
        configure(Options._of(asked))
        made._config, made._given = asked._config, asked._given
    made._timeout = asked._timeout
    world = parent.global_ranks_in_group  # none: the default group
    made.global_ranks_in_group = [world[rank] if rank < len(world) else rank for rank in ranks]
    return made


def connections(text: str) -> int:
    """Return the number that a text begins with, as CUDA reads its own variable; else 0."""
    number = re.match(r"\s*[+-]?[0-9]{1,9}", text)
    return int(number[0]) if number else 0


def _compare(options: Options, configured: Options, except_for: str) -> None:
    for name in sorted(options._given - {except_for}):
        wanted, now = getattr(options, name), getattr(configured, name)
        if ATTRIBUTES[name].scope != PROCESS or wanted == now:
            continue
        asks, is_now = f"{name}={wanted}", f"{name}={now}"
        if name == "secret":
            asks, is_now = "another secret", "its own"
        if name in OBSERVING:
            process.say(f"WARNING: a group asks for {asks}, and this process keeps {is_now}")
            continue
        raise ValueError(
            f"a group asks for {asks}, and the first group of this process has set {is_now}: "
            "give all groups of a process the same"
        )
