"""Connections between hosts that are encrypted: right results, and nobody reads or joins them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import ROOT
from lab.certificates import Authority
from lab.hosts import Hosts, RankResult
from lab.limits import limit
from lab.namespaces import missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(180),
]

BY_SECRET = {"RINGCOMM_TLS": "on", "RINGCOMM_SECRET": "of this test"}
EVERYTHING = [sys.executable, str(ROOT / "lab" / "faults" / "network_rank.py"), "everything", "1"]


def check(results: list[RankResult]) -> None:
    for rank, result in enumerate(results):
        lines = [line for line in result.output.splitlines() if line.startswith("{")]
        assert lines, f"rank {rank}: {result.output}"
        answer = json.loads(lines[-1])
        assert (answer["rank"], answer["error"]) == (rank, "")


@pytest.mark.parametrize("more", [{}, {"RINGCOMM_FLOWS": "2"}], ids=["one flow", "two flows"])
def test_every_collective_by_the_secret(more: dict[str, str]) -> None:
    with Hosts(2) as hosts:
        check(hosts.run_ranks(EVERYTHING, 2, {**BY_SECRET, **more, "OPERATIONS": "16"}))


def test_every_collective_by_certificates(tmp_path: Path) -> None:
    """Each host has its own, and no secret is needed."""
    ours = Authority(tmp_path, "ours")
    by_host = [ours.variables(f"host{host}") for host in range(3)]
    with Hosts(3) as hosts:
        check(hosts.run_ranks(each_its_own(by_host, EVERYTHING), 1, {"OPERATIONS": "16"}))


def each_its_own(by_rank: list[dict[str, str]], command: list[str]) -> list[str | Path]:
    """A command that has other variables on each rank."""
    cases = "".join(
        f"{rank}) export {' '.join(f'{name}={value!r}' for name, value in variables.items())};;"
        for rank, variables in enumerate(by_rank)
        if variables
    )
    return ["sh", "-c", f'case $RANK in {cases} esac; exec "$@"', "sh", *command]


# ---- what the wire shows

MARK = b"tensor of a user"
CAPTURE = """
import select, signal, socket, sys
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as wire:
    wire.bind(("eth0", 0))
    wire.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: more than net.core.rmem_max
    with open(sys.argv[1], "wb") as file:
        open(sys.argv[1] + ".begun", "w").close()
        while select.select([wire], [], [], 0.2)[0] or not stop:
            if not select.select([wire], [], [], 0)[0]: continue
            file.write(wire.recv(1 << 17))
"""
MARKS = """
import torch, torch.distributed as dist
dist.init_process_group("ringcomm")
rank = dist.get_rank()
for count in (1, 100, 70_000):
    mark = torch.frombuffer(bytearray(MARK * count), dtype=torch.uint8)
    mine = mark.clone() if rank == 0 else torch.zeros_like(mark)
    dist.broadcast(mine, 0)
    assert torch.equal(mine, mark)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    parts = [torch.empty_like(mark) for _ in range(2)]
    dist.all_gather(parts, mark)
    dist.all_to_all(parts, [mark, mark])
    work = dist.isend(mark, 1 - rank)
    dist.recv(mine.zero_(), 1 - rank)
    work.wait()
    assert torch.equal(mine, mark)
dist.barrier()
dist.destroy_process_group()
""".replace("MARK", repr(MARK))


def on_the_wire(folder: Path, env: dict[str, str]) -> bytes:
    """All that passes while two ranks send tensors with the mark."""
    file = folder / "capture"
    with Hosts(2) as hosts:
        # A packet for each piece: the capture is whole, and each piece shows in it.
        capture = hosts.start(1, [sys.executable, "-c", CAPTURE, file])
        deadline = time.monotonic() + limit(20)
        while not Path(f"{file}.begun").exists():
            assert time.monotonic() < deadline, "the capture does not begin"
            time.sleep(0.01)
        results = hosts.run_ranks([sys.executable, "-c", MARKS], 1, env)
        os.killpg(capture.pid, signal.SIGTERM)
        capture.wait(timeout=limit(20))
    assert [result.returncode for result in results] == [0, 0], results
    return file.read_bytes()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_capture_shows_no_byte_of_a_tensor(tmp_path: Path, encrypted: bool) -> None:
    seen = on_the_wire(tmp_path, BY_SECRET if encrypted else {})
    assert len(seen) > 4 * 70_000 * len(MARK), "the capture has too little"
    assert (MARK in seen) is not encrypted
    if encrypted:  # nor a part of it
        assert not any(MARK[at : at + 6] in seen for at in range(len(MARK) - 6))


# ---- a kernel that encrypts

UML = shutil.which("linux.uml")
MODULES = sorted(Path("/usr/lib/uml/modules").glob("*/kernel"))
IN_UML = """#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t tmpfs tmpfs /mnt
ip link set lo up
for name in crypto/gf128mul crypto/ghash-generic crypto/ctr crypto/gcm net/tls/tls; do
    [ ! -e MODULES/$name.ko ] || insmod MODULES/$name.ko
done
for way in wmem rmem; do echo "SMALL" > /proc/sys/net/ipv4/tcp_$way; done
cat /proc/net/tls_stat
COMMANDS
cat /proc/net/tls_stat
halt -f -p
"""
SMALL = "4096 16384 65536"  # bytes of a socket: most of a tensor waits for room
needs_uml = pytest.mark.skipif(
    not (UML and MODULES), reason="kTLS: `apt install user-mode-linux kmod`"
)


def in_uml(folder: Path, commands: str, memory: str, seconds: float) -> str:
    """A kernel as a process, with its own loopback: the commands run there, on these files."""
    assert UML is not None
    script = folder / "init"
    text = IN_UML.replace("MODULES", str(MODULES[-1])).replace("SMALL", SMALL)
    script.write_text(text.replace("COMMANDS", commands))
    script.chmod(0o755)
    root = ["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={script}"]
    done = subprocess.run(
        [UML, *root, f"mem={memory}", "con=null", "con0=null,fd:1"],
        capture_output=True,
        text=True,
        timeout=limit(seconds),
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},  # where it has its console
    )
    if "fatal_sigsegv" in done.stdout and "TlsTxSw" not in done.stdout:
        pytest.skip("user-mode Linux cannot restore the registers of this processor")
    sealed = [int(line.split()[1]) for line in done.stdout.splitlines() if "TlsTxSw" in line]
    assert sealed[0] == 0 < sealed[1], done.stdout[-3000:]
    return done.stdout


@needs_uml
def test_the_kernel_seals(cpp_program: Callable[..., Path], tmp_path: Path) -> None:
    worn, lent = cpp_program("network_test"), cpp_program("hardship_test")
    said = in_uml(tmp_path, f"{worn} keys\n{lent} lent", "256M", 60)
    for check in ("keys wear out", "lent in clear", "lent, encrypted"):
        assert f"ok {check}" in said, said[-2000:]


# ---- tensors that change as soon as a call has returned

CHANGES = """
import datetime, os, sys, torch, torch.distributed as dist
torch.set_num_threads(1)
given = {"init_method": "file://" + sys.argv[1]} if len(sys.argv) > 1 else {}
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
patience = datetime.timedelta(seconds=200)
dist.init_process_group("ringcomm", rank=rank, world_size=size, timeout=patience, **given)
COUNT = 1 << 18
def full(number): return torch.full((COUNT,), number)
def empty(): return [torch.zeros(COUNT) for _ in range(size)]
def broadcast(mine, theirs, root): dist.broadcast(mine if rank == root else theirs[root], root)
def all_gather(mine, theirs, root): dist.all_gather(theirs, mine)
def gather(mine, theirs, root): dist.gather(mine, theirs if rank == root else None, root)
def scatter(mine, theirs, root):
    dist.scatter(theirs[root], [mine] * size if rank == root else None, root)
def all_to_all(mine, theirs, root): dist.all_to_all(theirs, [mine] * size)
def all_reduce(mine, theirs, root):
    theirs[0].copy_(mine)
    dist.all_reduce(theirs[0])
def reduce(mine, theirs, root): dist.reduce(mine, root); theirs[0].copy_(mine)
def reduce_scatter(mine, theirs, root): dist.reduce_scatter(theirs[0], [mine] * size)
def send(mine, theirs, root):
    if rank == root: dist.send(mine, 1 - rank)
    else: dist.recv(theirs[root], root)
def isend(mine, theirs, root):
    if rank == root: dist.isend(mine, 1 - rank).wait()
    else: dist.recv(theirs[root], root)
SUMS = all_reduce, reduce, reduce_scatter
ALL = broadcast, all_gather, gather, scatter, all_to_all, send, isend, *SUMS
for number in range(ROUNDS):
    for call in ALL:
        root, mine, theirs = number % size, full(10.0 * number + rank), empty()
        call(mine, theirs, root)
        # Inputs are the program's again, and so are outputs that are passed on.
        mine.fill_(-1.0)
        got = [part.unique().tolist() for part in theirs]
        for part in theirs: part.fill_(-2.0)
        wanted = [[10.0 * number + peer] for peer in range(size)]
        if call in SUMS:
            got, wanted = got[:1], [[20.0 * number + 1]]
            if call is reduce and rank != root: continue
        for peer in range(size):
            rooted = call in (broadcast, scatter, send, isend)
            if call in SUMS and peer > 0 or rooted and peer != root: continue
            if rooted and call is not scatter and rank == root: continue
            if call is gather and rank != root: continue
            text = f"{call.__name__} of round {number}: {got[peer]} for {wanted[peer]}"
            assert got[peer] == wanted[peer], text
dist.barrier()
dist.destroy_process_group()
print("all exact", flush=True)
"""


@pytest.mark.parametrize("env", [{}, BY_SECRET], ids=["in clear", "encrypted"])
def test_tensors_that_change_after_the_call(env: dict[str, str]) -> None:
    """Sockets hold little, and the link is slower than a rank: bytes wait when a call returns."""
    with Hosts(2, rate="500mbit") as hosts:
        for host in range(2):
            for way in ("wmem", "rmem"):
                hosts.inside(host, "sysctl", "-qw", f"net.ipv4.tcp_{way}={SMALL}")
        script = CHANGES.replace("ROUNDS", "6")
        for result in hosts.run_ranks([sys.executable, "-c", script], 1, env):
            assert (result.returncode, "all exact" in result.output) == (0, True), result.output


@needs_uml
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tensors_that_change_where_the_kernel_seals(tmp_path: Path) -> None:
    script = tmp_path / "changes.py"
    script.write_text(CHANGES.replace("ROUNDS", "3"))
    variables = {**BY_SECRET, "WORLD_SIZE": "2", "RINGCOMM_TRANSPORT": "tcp", "TMPDIR": "/mnt"}
    words = " ".join(f"{name}='{value}'" for name, value in variables.items())
    run = f"env {words} RANK=%d {sys.executable} {script} /mnt/store 2>&1"
    said = in_uml(tmp_path, f"{run % 0} &\n{run % 1}\nwait", "1500M", 500)
    assert said.count("all exact") == 2, said[-3000:]


# ---- who does not belong to it

ONE = """
import torch, torch.distributed as dist
from datetime import timedelta
try:
    dist.init_process_group("ringcomm", timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(10))
    print("it works")
except Exception as error:
    print("told:", error)
"""


def told(by_rank: list[dict[str, str]]) -> list[str]:
    """Return what two ranks with these variables say."""
    command = each_its_own(by_rank, [sys.executable, "-c", ONE])
    with Hosts(2) as hosts:
        results = hosts.run_ranks(command, 1, {"RINGCOMM_RESUME_SECONDS": "2"})
    for result in results:
        assert "it works" not in result.output
        assert "told:" in result.output, result.output
    return [result.output for result in results]


def test_another_secret() -> None:
    for text in told([BY_SECRET, {**BY_SECRET, "RINGCOMM_SECRET": "of another"}]):
        assert "it does not know the secret of this job: RINGCOMM_SECRET" in text


def test_one_rank_does_not_encrypt() -> None:
    """So a downgrade is none: nobody goes on in the clear who was told to encrypt."""
    texts = told([BY_SECRET, {"RINGCOMM_SECRET": "of this test"}])
    assert any("TLS is by-secret here and off at" in text for text in texts), texts
    assert any("TLS is off here and by-secret at" in text for text in texts), texts


def test_a_certificate_of_another_authority(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path / "theirs", "theirs")
    stranger = {**theirs.variables("host1"), "RINGCOMM_TLS_CA": str(tmp_path / "ours.pem")}
    texts = told([ours.variables("host0"), stranger])
    said = "its certificate is refused", "it refuses the certificate of RINGCOMM_TLS_CERT"
    assert any(any(words in text for words in said) for text in texts), texts


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RINGCOMM_TLS": "on"}, "RINGCOMM_TLS=on needs a key: set RINGCOMM_SECRET_FILE, or"),
        ({"RINGCOMM_TLS_CERT": "/a"}, "RINGCOMM_TLS_CERT is set and RINGCOMM_TLS is off"),
        (
            {"RINGCOMM_TLS": "on", "RINGCOMM_TLS_CERT": "/a"},
            "RINGCOMM_TLS_CERT needs RINGCOMM_TLS_KEY and RINGCOMM_TLS_CA, too",
        ),
    ],
)
def test_settings_that_do_not_fit(variables: dict[str, str], said: str) -> None:
    """Before anything is sent: a sentence."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ONE],
        env={**os.environ, **alone, **variables},
        capture_output=True,
        text=True,
        timeout=limit(60),
    )
    assert f"told: {said}" in done.stdout, done.stdout + done.stderr


def test_a_key_that_others_can_read(tmp_path: Path) -> None:
    variables = Authority(tmp_path, "ours").variables("host0")
    Path(variables["RINGCOMM_TLS_KEY"]).chmod(0o644)
    for text in told([variables, variables]):
        assert f"RINGCOMM_TLS_KEY={variables['RINGCOMM_TLS_KEY']}" in text
        assert "chmod" in text
