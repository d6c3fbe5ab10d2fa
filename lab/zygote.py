"""Python programs that start at once: forked from an interpreter that has imported torch.

Importing torch takes two seconds of a core, its compiler and scikit-learn some more, and the tests
start some hundred programs. `Zygote` starts one interpreter that has imported all of it (Android
calls such a process a zygote) and writes an executable, `Zygote.python`, that takes the arguments
of `python` and behaves like it: same arguments, environment, descriptors, namespaces, signals and
exit status. Where it cannot do the same, it is an interpreter as any other: other libraries are to
be loaded first, say, or the user differs. The long forms do without (conftest.py). A program that
has ZYGOTE_OFF in its environment is an interpreter as any other, too; one that has ZYGOTE_WHOLE
takes all modules apart at its end, as others do.

    python -m lab.zygote FOLDER     serves FOLDER/socket until its standard input ends
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import marshal
import os
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any

from lab import START, zygote_client

PRELOADED = [
    "torch.distributed.run",
    "torch._dynamo",  # DDP imports it
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "sklearn.datasets",
    "pytest",  # ranks import files of tests
]
WHOLE = "ZYGOTE_WHOLE"
PR_SET_PDEATHSIG = 1
HIGH = 700  # descriptors from here on are for moving others about


class Zygote:
    """The interpreter, until `close`. Its programs end with it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ringcomm-zygote-"))
        self.python = self.folder / "python"
        client = Path(zygote_client.__file__).read_text(encoding="utf-8")
        self.python.write_text(f"#!{sys.executable} -IS\n{client}")
        self.python.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lab.zygote", self.folder],
            cwd=START,
            stdin=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


# ---- the interpreter


class Server:
    """Forks a program for each connection, and reports its end there."""

    def __init__(self, folder: Path, same: list[Any]) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / "new"))
        self.listener.listen(128)
        self.children: dict[int, socket.socket] = {}
        self.ended, writer = socket.socketpair()
        for end in (self.ended, writer):
            end.setblocking(False)
        self.writer = writer
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        (folder / "facts").write_bytes(marshal.dumps(same))
        (folder / "new").rename(folder / "socket")  # clients wait for it

    def serve(self) -> dict[str, Any] | None:
        """Return in each child what it is to run; None when standard input has ended."""
        with selectors.DefaultSelector() as ready:
            self.ready = ready
            for source in (sys.stdin, self.listener, self.ended):
                ready.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is sys.stdin:
                        return None
                    if key.fileobj is self.ended:
                        self.reap()
                    elif key.fileobj is self.listener:
                        if (order := self.begin(self.listener.accept()[0])) is not None:
                            return order
                    else:
                        self.hear(key.data, key.fileobj)  # type: ignore[arg-type]

    def begin(self, connection: socket.socket) -> dict[str, Any] | None:
        data, descriptors, _, _ = socket.recv_fds(connection, 4, 250)
        length = int.from_bytes(data, "little")
        data = b""
        while len(data) < length and (part := connection.recv(length - len(data))):
            data += part
        child = os.fork() if data and len(data) == length else None
        if child == 0:
            signal.set_wakeup_fd(-1)
            for end in (self.listener, self.ended, self.writer, *self.children.values()):
                end.close()
            connection.close()
            self.ready.close()
            return {**marshal.loads(data), "received": descriptors}
        for descriptor in descriptors:
            os.close(descriptor)
        if child is None:
            connection.close()
            return None
        self.children[child] = connection
        self.ready.register(connection, selectors.EVENT_READ, child)
        return None

    def hear(self, child: int, connection: socket.socket) -> None:
        """Pass on signals; a client that is gone was killed, and its program with it."""
        numbers = connection.recv(16)
        if not numbers:
            self.ready.unregister(connection)
            leads = os.getpgid(child) == child
            os.kill(-child if leads else child, signal.SIGKILL)
        for number in numbers:
            os.kill(child, number)

    def reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.ended.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                connection = self.children.pop(ended[0])
                with contextlib.suppress(KeyError):
                    self.ready.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.sendall(ended[1].to_bytes(4, "little"))
                connection.close()


def become(order: dict[str, Any]) -> tuple[str, str]:
    """Make this process what the client was; return what to run, and how."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    take_descriptors(order)
    for name, descriptor in order["namespaces"].items():
        other = os.fstat(descriptor).st_ino != Path(f"/proc/self/ns/{name}").stat().st_ino
        if other and libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns of {name}")
        os.close(descriptor)
    if order["leader"]:
        os.setsid()
    for kind, both in enumerate(order["limits"]):
        if resource.getrlimit(kind) != both:
            resource.setrlimit(kind, both)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    os.umask(order["umask"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.executable = order["python"]
    sys.modules["multiprocessing.spawn"].set_executable(order["python"])
    how, what, sys.argv = order["how"], order["what"], order["arguments"]
    first = {"-c": "", "-m": order["folder"]}.get(how, str(Path(what).resolve().parent))
    more = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    sys.path[:] = [first, *more, *PATH]
    if "-u" in order["flags"] or os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.modules["torch.distributed"].set_debug_level_from_env()
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        sys.modules["torch"]._import_device_backends()
    return how, what


def take_descriptors(order: dict[str, Any]) -> None:
    """Give what was received the numbers that it had in the client, and close the rest."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in order["received"]]
    os.closerange(0, HIGH)
    for number, descriptor in zip(order["numbers"], high, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def run(how: str, what: str) -> None:
    if how == "-m":
        sys.modules.pop(what, None)
        importlib.import_module("runpy")._run_module_as_main(what)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if how == "-c":
        text, name = what, "<string>"
    else:
        text, name = Path(what).read_text(encoding="utf-8"), what
        main.__file__ = what
    exec(compile(text, name, "exec"), main.__dict__)


def run_quickly(how: str, what: str) -> None:
    """Do as an interpreter does at the end, but for taking all modules apart: over a second."""
    code = 0
    try:
        run(how, what)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  as an interpreter does
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 255)


if __name__ == "__main__":
    PATH = sys.path[1:]  # without START
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    same = zygote_client.facts(os.environ)
    for module in PRELOADED:
        importlib.import_module(module)
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]  # a program imports that of its own path
    gc.freeze()
    if (order := Server(Path(sys.argv[1]), same).serve()) is not None:
        begin = become(order)
        (run if WHOLE in os.environ else run_quickly)(*begin)
