"""Network namespaces whose names say which process made them: the ground under hosts.py."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from lab.limits import limit

# Debian's package of each program.
TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "ss": "iproute2",
    "bridge": "iproute2",
    "nft": "nftables",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
PROBE = """
ip link add probe0 type bridge
ip link add probe1 type veth peer name probe2
tc qdisc add dev probe1 root tbf rate 1gbit burst 256kb latency 20ms
nft add table inet probe
"""
NAME = re.compile(r"ringcomm-(\d+)-(\d+)-\d+-(?:switch|host\d+|files)")


@functools.cache
def missing() -> str | None:
    """Return why there can be no hosts here; None when there can."""
    if os.geteuid() != 0:
        return "hosts as network namespaces need root"
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"hosts as network namespaces need {tool}: `apt install {package}`"
    probe = ["unshare", "--net", "--mount", "--uts", "sh", "-ec", PROBE]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.returncode != 0:
        return f"this kernel or container makes no network namespaces: {done.stderr.strip()}"
    return None


def tool(*words: object, text: str | None = None) -> str:
    """Run a program that has to succeed; what it printed."""
    command = [str(word) for word in words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=limit(30))
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def started(pid: int) -> str | None:
    """Return when a process started, in ticks: with its number it names a process for good."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def own_name(serial: int) -> str:
    """Return how names of this process begin."""
    return f"ringcomm-{os.getpid()}-{started(os.getpid())}-{serial}"


def remove_leftovers() -> None:
    """Remove namespaces and folders whose maker is gone, and what runs there."""
    folders = {path.name: path for path in Path(tempfile.gettempdir()).glob("ringcomm-*-files")}
    for word in [*tool("ip", "netns", "list").split(), *folders]:
        match = NAME.fullmatch(word)
        if not match or started(int(match[1])) == match[2]:
            continue
        if word in folders:
            shutil.rmtree(folders[word], ignore_errors=True)
        else:
            remove(word)


def remove(namespace: str) -> None:
    """Remove a namespace of ours; only what we started can run in it."""
    end = time.monotonic() + 5
    while time.monotonic() < end:  # a process may fork while we look
        done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
        if not done.stdout.split():
            break
        for pid in done.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
    # Another process may be removing the same leftovers.
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def processes(namespace: str, word: str) -> list[int]:
    """Return the processes in a namespace whose command line has a word that begins like this."""
    pids = []
    for pid in map(int, tool("ip", "netns", "pids", namespace).split()):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if any(part.startswith(word.encode()) for part in words):
            pids.append(pid)
    return pids
