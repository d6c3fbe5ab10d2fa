"""A Slurm cluster on this machine, started by hand: each node is a host of lab/hosts.py.

    with Slurm(3, folder, KillOnBadExit=1) as slurm:
        slurm.run("sbatch", "job.sbatch")

Each node has a namespace of processes too: when its first one dies, all of them do, as those of a
host do. The first node runs the controller, and commands are given there. Needs root and Debian's
packages; `missing()` says what.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from lab import namespaces
from lab.hosts import Hosts
from lab.limits import limit

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged")
ON_A_NODE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
# As in a cluster of Debian's, but for cgroups: hosts.py mounts none.
ALWAYS = {
    "ClusterName": "lab",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "JobAcctGatherType": "jobacct_gather/none",
    "AccountingStorageType": "accounting_storage/none",
    "MailProg": "/bin/true",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_CPU",
    "SlurmdParameters": "config_overrides",
    "KillWait": 2,
}


def missing() -> str | None:
    """Return why there can be no cluster here; None when there can."""
    if any(shutil.which(program) is None for program in PROGRAMS):
        return "Slurm is not installed: `apt install slurmctld slurmd slurm-client munge`"
    return namespaces.missing()


class Slurm:
    """A cluster of so many nodes, host0 and so on; `settings` are of slurm.conf."""

    def __init__(self, nodes: int, folder: Path, **settings: Any) -> None:
        self.hosts = Hosts(nodes)
        self.folder = folder
        self.settings = {**ALWAYS, **settings}
        self.environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "HOME": str(folder),
            # A client of torch's store asks for the name of its own address.
            "RES_OPTIONS": "timeout:1 attempts:1",
        }
        self._nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        self.hosts.__enter__()
        try:
            self._configure()
            self._start()
        except BaseException:
            self.hosts.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.close()

    def _configure(self) -> None:
        addresses = self.hosts.addresses
        lines = [f"{name}={value}" for name, value in self.settings.items()]
        lines += [
            f"SlurmctldHost=host0({addresses[0]})",
            f"AuthInfo=socket={self.folder}/munge",
            f"StateSaveLocation={self.folder}",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmctldLogFile={self.folder}/slurmctld.log",
            f"SlurmdSpoolDir={self.folder}/%n",
            f"SlurmdPidFile={self.folder}/%n.pid",
            f"SlurmdLogFile={self.folder}/%n.log",
            "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        ]
        for index, address in enumerate(addresses):
            lines.append(f"NodeName=host{index} NodeAddr={address} CPUs=8")
            (self.folder / f"host{index}").mkdir()
        (self.folder / "slurm.conf").write_text("\n".join([*lines, ""]))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _start(self) -> None:
        words = [f"--{name}={self.folder}/munge.{name}" for name in ("pid-file", "log-file")]
        words += [f"--key-file={self.folder}/key", f"--seed-file={self.folder}/munge.seed"]
        self._daemon(0, "munged", "-F", "--force", f"--socket={self.folder}/munge", *words)
        self._until("munged", (self.folder / "munge").exists)
        self._daemon(0, "slurmctld", "-D")
        for index in range(self.hosts.count):
            self._nodes.append(self._daemon(index, "slurmd", "-D", "-N", f"host{index}"))
        nodes = f"{self.hosts.count} idle"
        self._until("the nodes", lambda: self.run("sinfo", "-h", "-o", "%D %t").strip() == nodes)

    def _daemon(self, node: int, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "daemons.log").open("ab") as output:
            command = [*ON_A_NODE, *words]
            return self.hosts.start(node, command, self.environment, output.fileno())

    def _until(self, what: str, ready: Any) -> None:
        deadline = time.monotonic() + limit(10)
        while not ready():
            log = (self.folder / "daemons.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"{what} of the Slurm cluster: {log}"
            time.sleep(0.1)

    def start(
        self, *words: object, output: Path, **environment: str | None
    ) -> subprocess.Popen[bytes]:
        """Start a command on the first node, beside Slurm, with its output in a file."""
        command = [str(word) for word in words]
        with output.open("wb") as stream:
            merged = {**self.environment, **environment}
            return self.hosts.start(0, command, merged, stream.fileno())

    def run(self, *words: object, **environment: str | None) -> str:
        """Run a command on the first node, and return what it printed, errors included."""
        output = self.folder / "command.out"
        self.start(*words, output=output, **environment).wait(limit(60))
        return output.read_text()

    def submit(self, *words: object) -> int:
        """Submit a batch job; return its number."""
        told = self.run("sbatch", *words)
        match = re.search(r"Submitted batch job (\d+)", told)
        assert match, told
        return int(match[1])

    def state(self, job: int) -> str:
        """Return a job's state, as RUNNING or COMPLETED."""
        told = self.run("scontrol", "show", "job", job)
        match = re.search(r"JobState=(\w+)", told)
        assert match, told
        return match[1]

    def tasks(self, node: int, word: str) -> list[int]:
        """Return the processes of a node that have this word on their command line."""
        return namespaces.processes(self.hosts.namespaces[node], word)

    def lose(self, node: int) -> None:
        """End a node: all of its processes die at once, and nothing answers there any more."""
        self.hosts.cut(node)
        os.killpg(self._nodes[node].pid, signal.SIGKILL)
        self._nodes[node].wait()
