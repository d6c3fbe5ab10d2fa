"""`ringcomm doctor` in network namespaces: each fault is named, in time, with its exit status."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringcomm
from lab.hosts import Hosts, RankResult
from lab.limits import claim, limit
from lab.namespaces import missing, tool
from lab.ports import free_port
from ringcomm.tools.doctor import facts

needs_hosts = pytest.mark.skipif(missing() is not None, reason=str(missing()))
SECONDS = limit(60)  # guards against hangs; the examination itself says how long it took
PORT = 40000
# Programs start side by side on a busy machine, and are waited for. Where one never comes, shorter.
WAIT = ["--wait", "30"]
SHORT = ["--wait", "8"]
DOCTOR = [sys.executable, "-m", "ringcomm", "doctor"]


class Told:
    """The findings of rank 0's doctor."""

    def __init__(self, results: list[RankResult], path: Path, wait: list[str]) -> None:
        self.results = results
        assert path.exists(), results
        self.json: dict[str, Any] = json.loads(path.read_text())
        self.findings = [
            f"{finding['severity']}: {finding['sentence']}"
            for finding in self.json["findings"]
            if "Other processes on" not in finding["sentence"]  # the machine may be busy
        ]
        self.status = self.json["status"]
        assert results[0].returncode == self.status, results
        assert self.json["seconds"] < float(wait[1]) + claim(15)  # 26 s, by the default of --wait

    def says(self, *words: str) -> str:
        """Return the finding that has all these words."""
        matching = [finding for finding in self.findings if all(word in finding for word in words)]
        assert len(matching) == 1, (words, self.findings, self.results)
        return matching[0]


class Lab:
    """Two hosts with a rank on each."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self._path = hosts, folder / "found.json"

    def run(self, wait: list[str] = WAIT, command: list[str] | None = None, **env: str) -> Told:
        """Run a rank on each host; rank 0 writes a file."""
        words = [*(command or DOCTOR), *wait]
        script = f'[ "$RANK" = 0 ] && set -- "$@" --json {self._path}; exec "$@"'
        env = {"RINGCOMM_PORTS": f"{PORT}-{PORT + 3}", **env}
        results = self.hosts.run_ranks(["sh", "-c", script, "sh", *words], env=env, timeout=SECONDS)
        return Told(results, self._path, wait)

    def firewall(self, host: int, *rules: str) -> None:
        lines = ["table inet examined {", "chain in {", "type filter hook input priority 0", *rules]
        self.hosts.inside(host, "nft", "-f", "-", text="\n".join([*lines, "}", "}", ""]))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Hosts(2) as hosts:
        yield Lab(hosts, tmp_path)


@needs_hosts
def test_healthy_hosts(lab: Lab) -> None:
    told = lab.run()
    assert (told.status, told.findings) == (0, [])
    (pair,) = [pair for pair in told.json["pairs"] if pair["ranks"] == [0, 1]]
    assert pair["transport"] == "TCP"
    assert pair["mtu"] == 1500
    assert pair["latency"] > 0
    assert min(pair["forth"], pair["back"]) > 1e6
    assert abs(pair["offset"]) < 0.5
    assert "MB/s" not in told.results[1].output  # rank 0 reports


@needs_hosts
def test_a_dropped_port(lab: Lab) -> None:
    """One way is closed: the other connects, so it works."""
    lab.firewall(1, f"tcp dport {PORT} drop")
    told = lab.run()
    assert told.status == 1
    words = "A firewall drops packets of rank 0 on host0 to host1 at"
    assert told.says(words).endswith(f"port {PORT}; other ports of that host do answer.")


@needs_hosts
def test_a_firewall_that_drops_on_both_sides(lab: Lab) -> None:
    for host in range(2):
        lab.firewall(host, f"tcp dport {PORT} drop")
    told = lab.run()
    assert told.status == 2
    told.says("error: Rank 0 on host0 and rank 1 on host1 cannot reach one another.")
    told.says("A firewall drops packets of rank 1 on host1 to host0 at", f"port {PORT}")


@needs_hosts
def test_a_host_that_answers_nothing_new(lab: Lab) -> None:
    """A firewall that lets out what it does not let in."""
    lab.firewall(1, "ct state established accept", "tcp flags syn drop")
    told = lab.run()
    assert told.status == 1
    told.says("warning: Connections of rank 0 on host0 to host1", "time out")


@needs_hosts
def test_a_store_behind_a_firewall(lab: Lab) -> None:
    lab.firewall(0, "iifname eth0 tcp dport 29500-29600 drop")
    told = lab.run(SHORT)
    assert told.status == 2
    told.says("Rank 1 never came.")
    assert "does not answer" in told.results[1].output
    assert "timed out" in told.results[1].output
    assert told.results[1].returncode == 2


@needs_hosts
def test_two_mtus(lab: Lab) -> None:
    tool("ip", "-n", lab.hosts.namespaces[1], "link", "set", "eth0", "mtu", 1400)
    told = lab.run()
    assert told.status == 1
    told.says("Eth0 of host0 has an MTU of 1500 bytes, and eth0 of host1 has an MTU of 1400 bytes")


@needs_hosts
def test_large_packets_get_lost(tmp_path: Path) -> None:
    with Hosts(2, mtu=9000) as hosts:
        lab = Lab(hosts, tmp_path)
        for host in range(2):  # as a switch with a smaller MTU does it
            lab.firewall(host, "iifname eth0 meta length > 1400 drop")
        told = lab.run()
    assert told.status == 2
    told.says("small messages pass and large ones do not", "packets of up to 9000 bytes get lost")


@needs_hosts
def test_an_interface_that_is_not_there(lab: Lab) -> None:
    told = lab.run(RINGCOMM_IFNAME="ib0")
    assert told.status == 2
    told.says("Rank 1 on host1 listens nowhere: RINGCOMM_IFNAME=ib0 leaves no address")


@needs_hosts
def test_an_interface_of_another_network(lab: Lab) -> None:
    """Each host has such an address, and no way to the other's."""
    for host, namespace in enumerate(lab.hosts.namespaces):
        tool("ip", "-n", namespace, "link", "add", "away0", "type", "veth", "peer", "name", "away1")
        tool("ip", "-n", namespace, "link", "set", "away1", "up")
        tool("ip", "-n", namespace, "addr", "add", f"10.250.{host}.1/24", "dev", "away0")
        tool("ip", "-n", namespace, "link", "set", "away0", "up")
    told = lab.run(RINGCOMM_IFNAME="away0")
    assert told.status == 2
    told.says("Rank 0 on host0 and rank 1 on host1 cannot reach one another.")
    told.says(
        "Connections of rank 0 on host0 to host1 at 10.250.1.1", "fail: Network is unreachable"
    )


@needs_hosts
def test_loopback_is_no_way_to_another_host(lab: Lab) -> None:
    told = lab.run(RINGCOMM_IFNAME="lo")
    assert told.status == 2
    told.says("Rank 1 on host1 listens at 127.0.0.1", "where no other host reaches it")


@needs_hosts
def test_two_hosts_with_one_name(lab: Lab) -> None:
    lab.hosts.names[1] = "host0"
    told = lab.run()
    assert told.status == 1
    told.says("warning: 2 hosts have one name, host0: those of rank 0 and rank 1.")


@needs_hosts
def test_few_descriptors(lab: Lab) -> None:
    few = '[ "$RANK" = 0 ] || ulimit -n 24; exec "$@"'
    told = lab.run(command=["sh", "-c", few, "sh", *DOCTOR])
    assert told.status in (1, 2)
    told.says("Rank 1 on host1 may open 24 descriptors")


@needs_hosts
def test_a_rank_that_never_comes(lab: Lab) -> None:
    told = lab.run(SHORT, WORLD_SIZE="3")
    assert told.status == 2
    told.says("error: Rank 2 never came.")
    assert [pair for pair in told.json["pairs"] if pair["ranks"] == [0, 1] and pair["forth"]]


def test_a_build_is_the_version_and_a_hash_of_the_source() -> None:
    assert re.fullmatch(re.escape(ringcomm.__version__) + "-[0-9a-f]{12}", facts.build())


@needs_hosts
def test_another_version(lab: Lab) -> None:
    program = """
import os, sys
from ringcomm.__main__ import main
from ringcomm.tools.doctor import facts
if os.environ["RANK"] == "1":
    facts.build = lambda: "0123456789ab"
sys.exit(main())
"""
    told = lab.run(command=[sys.executable, "-c", program, "doctor"])
    assert told.status == 2
    told.says("error: Ranks have different builds of ringcomm", "0123456789ab on rank 1")


@needs_hosts
def test_different_secrets(lab: Lab) -> None:
    secret = 'export RINGCOMM_SECRET="of rank $RANK"; exec "$@"'
    told = lab.run(command=["sh", "-c", secret, "sh", *DOCTOR])
    assert told.status == 2
    told.says("Rank 0 on host0 and host1 at", "have different secrets")


def test_four_ranks_of_one_host(tmp_path: Path) -> None:
    """Under torchrun: all pairs map one another's memory, and the matrix is full."""
    import subprocess

    path = tmp_path / "found.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    words = [*launcher, "-m", "ringcomm", "doctor", *WAIT, "--json", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=4 * SECONDS)
    assert done.returncode == 0, done.stderr
    told = json.loads(path.read_text())
    assert told["status"] == 0
    pairs = [pair for pair in told["pairs"] if pair["ranks"][0] != pair["ranks"][1]]
    assert len(pairs) == 6
    (host,) = told["hosts"]
    too_few = host["cores"] < 2
    for pair in pairs:
        assert pair["transport"] == "shared memory"
        assert (pair["doubt"] == "too few cores") == too_few
        assert (pair["latency"] > 0) == (not too_few)
        assert (min(pair["forth"], pair["back"]) > 0) == (not too_few)
    assert ("too few cores: " in done.stdout) == (host["cores"] < 4)
    assert host["others_cores"] is None or host["others_cores"] >= 0
    assert "measuring every pair" not in done.stdout + done.stderr  # stderr is no terminal
    matrix = done.stdout.partition("bandwidth (MB/s")[2].splitlines()[2:6]
    assert all("-" not in row and len(row.split()) == 5 for row in matrix), done.stdout


@pytest.mark.parametrize(
    ("number", "count"),
    [("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")],
)
def test_other_launchers(tmp_path: Path, number: str, count: str) -> None:
    """Tasks of srun and mpirun are numbered by variables of their own."""
    import os
    import subprocess

    always = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    always |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), count: "2"}
    words = [*DOCTOR, *WAIT, "--json", str(tmp_path / "found.json")]
    tasks = [subprocess.Popen(words, env={**always, number: str(rank)}) for rank in (0, 1)]
    assert [task.wait(4 * SECONDS) for task in tasks] == [0, 0]
    told = json.loads((tmp_path / "found.json").read_text())
    assert len(told["ranks"]) == 2


def test_alone(tmp_path: Path) -> None:
    """Without a launcher it starts nothing, and looks at this host."""
    import subprocess

    words = ["env", "-u", "RANK", "-u", "MASTER_ADDR", *DOCTOR, "--json", "-"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
    told = json.loads(done.stdout)
    assert done.returncode == told["status"], done.stderr
    (facts,) = told["ranks"]
    assert facts["memfd_error"] == ""
    assert facts["cores"] > 0
    assert facts["descriptors_limit"] > 0


def test_a_busy_neighbour_is_seen(tmp_path: Path) -> None:
    import os
    import subprocess

    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port())}
    words = [*DOCTOR, *WAIT, "--json", str(tmp_path / "found.json")]
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        ranks = [subprocess.Popen(words, env={**environment, "RANK": str(rank)}) for rank in (0, 1)]
        assert [rank.wait(4 * SECONDS) for rank in ranks] == [0, 0]
        neighbour.kill()
    told = json.loads((tmp_path / "found.json").read_text())
    (host,) = told["hosts"]
    if host["others_cores"] is None:
        pytest.skip("/proc/stat tells nothing here")
    assert host["others_cores"] > 0.3
    assert any("Other processes on" in finding["sentence"] for finding in told["findings"])
    (pair,) = [pair for pair in told["pairs"] if pair["ranks"] == [0, 1]]
    assert pair["doubt"] == ("too few cores" if host["cores"] < 2 else "others were busy")


def test_a_terminal_sees_how_far_it_is(tmp_path: Path) -> None:
    import os
    import pty
    import subprocess

    ours, theirs = pty.openpty()
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TERM": "xterm"}
    environment |= {"MASTER_PORT": str(free_port()), "ZYGOTE_OFF": "1"}
    words = [*DOCTOR, *WAIT, "--json", "-"]
    ranks = [
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=theirs,
            env={**environment, "RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    os.close(theirs)
    printed, _ = ranks[0].communicate(timeout=4 * SECONDS)
    assert [rank.wait(4 * SECONDS) for rank in ranks] == [0, 0]
    assert json.loads(printed)["status"] == 0
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert shown.count(b"looking for the store") == 1  # rank 0's alone
    assert b"waiting for 2 ranks" in shown
    assert b"measuring every pair" in shown
