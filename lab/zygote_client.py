"""The program `Zygote.python`: hands all that it was started with to a zygote, and waits.

Imports little (no pathlib, no typing): a program starts as fast as this does.
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import socket
import sys
import time

# An interpreter and its libraries read these when they begin: they have to be as the zygote's.
READ_AT_IMPORT = ("LD_", "OMP_", "MKL_", "KMP_", "GOMP_", "GLIBC_", "MALLOC_", "TORCH_", "PYTHON")
BUT_FOR = (
    "TORCH_DEVICE_BACKEND_AUTOLOAD",  # these four: zygote.py
    "TORCH_DISTRIBUTED_DEBUG",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn sets these two,
    "KMP_INIT_AT_FORK",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",  # and torchrun this one
)
FORWARDED = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
ENTERED, SAME = ["net", "uts", "mnt"], ["pid", "user", "ipc", "cgroup"]  # namespaces
FREE = 600  # descriptors from here on are free for them
KINDS = 16  # kinds of limits (RLIMIT_)
PATIENCE = 300  # seconds until the zygote has imported all


def facts(environment: os._Environ[str]) -> list[object]:
    """Return what has to be the same in a program and in its zygote."""
    names = [n for n in environment if n.startswith(READ_AT_IMPORT) and n not in BUT_FOR]
    with open("/proc/self/cgroup") as file:
        group = file.read()
    spaces = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in SAME}
    who = [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()]
    return [sorted((n, environment[n]) for n in names), group, spaces, who]


def command(words: list[str]) -> tuple[list[str], str, str, list[str]] | None:
    """Return flags, how, what and the program's arguments; None for any other command."""
    flags = []
    while words and words[0] in ("-u", "-B", "-q"):
        flags.append(words.pop(0))
    if len(words) > 1 and words[0] in ("-c", "-m"):
        return flags, words[0], words[1], [words[0], *words[2:]]
    if words and not words[0].startswith("-"):
        return flags, "script", words[0], words
    return None


def connect(folder: str) -> socket.socket:
    end = time.monotonic() + PATIENCE
    zygote = socket.socket(socket.AF_UNIX)
    while True:
        try:
            zygote.connect(folder + "/socket")
            return zygote
        except FileNotFoundError:
            if time.monotonic() > end or not os.path.isdir(folder):
                raise
            time.sleep(0.02)


def order(path: str, parsed: tuple[list[str], str, str, list[str]]) -> dict[str, object]:
    """Return what this process is, but for its descriptors."""
    flags, how, what, arguments = parsed
    mask = os.umask(0)
    os.umask(mask)
    return {
        "flags": flags,
        "how": how,
        "what": what,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": mask,
        "limits": [resource.getrlimit(kind) for kind in range(KINDS)],
        "leader": os.getsid(0) == os.getpid(),
        "python": path,
    }


def send(zygote: socket.socket, what: dict[str, object]) -> None:
    with os.scandir("/proc/self/fd") as entries:
        numbers = [int(entry.name) for entry in entries]
    # Not the zygote's, nor the folder's that was read.
    numbers = [n for n in numbers if n != zygote.fileno() and os.path.exists(f"/proc/self/fd/{n}")]
    spaces = {name: FREE + index for index, name in enumerate(ENTERED)}
    descriptors = numbers + [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in ENTERED]
    data = marshal.dumps({**what, "numbers": [*numbers, *spaces.values()], "namespaces": spaces})
    socket.send_fds(zygote, [len(data).to_bytes(4, "little")], descriptors)
    zygote.sendall(data)


def end_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def main(path: str, words: list[str]) -> None:
    folder = os.path.dirname(path)
    parsed = command(list(words))
    zygote = connect(folder)
    with open(folder + "/facts", "rb") as file:
        same = marshal.load(file) == facts(os.environ)
    if parsed is None or not same or "ZYGOTE_OFF" in os.environ:
        zygote.close()
        os.execv(sys.executable, [sys.executable, *words])
    send(zygote, order(path, parsed))
    for forwarded in FORWARDED:
        if signal.getsignal(forwarded) is not signal.SIG_IGN:
            signal.signal(forwarded, lambda number, _: zygote.sendall(bytes([number])))
    answer = zygote.recv(4, socket.MSG_WAITALL)
    if len(answer) < 4:
        os._exit(1)  # the zygote has ended, and its programs with it
    end_as(int.from_bytes(answer, "little"))


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[0]), sys.argv[1:])
