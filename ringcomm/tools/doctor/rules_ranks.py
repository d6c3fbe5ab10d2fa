"""Rules about the store, the ranks that are missing, and each rank by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ringcomm._text import ranks_text
from ringcomm.tools.doctor.facts import UNKNOWN
from ringcomm.tools.doctor.probe import CONNECTED, REFUSED
from ringcomm.tools.doctor.stages import Findings
from ringcomm.tools.doctor.words import (
    ERROR,
    NOTE,
    WARNING,
    Finding,
    by_value,
    machines,
    on_host,
    upper_first,
)

BESIDE = 10  # descriptors of a process beside those for its peers
LITTLE_MEMORY = 256 << 20


# ---- meeting


def store(found: Findings) -> Iterator[Finding]:
    reached, where = found.reached, f"{found.reached.name}:{found.reached.port}"
    if found.alone or found.excluded:
        return
    answers = reached.answers
    if reached.error:
        remedy = "see that MASTER_ADDR and MASTER_PORT are rank 0's, and that the port is free"
        yield Finding(ERROR, f"The store at {where} cannot be used: {reached.error}.", remedy)
    elif answers and CONNECTED not in answers.values():
        told = "; ".join(f"{address}: {answer}" for address, answer in answers.items())
        own = 0 in found.ranks and found.own_store
        if own:
            sentence = f"Rank 0 serves the store, but does not reach itself at {where}: {told}."
            yield Finding(WARNING, sentence, "give MASTER_ADDR an address of rank 0's host")
            return
        remedy = f"open port {reached.port} on that host, and see that rank 0 was started"
        if reached.loopback:
            remedy = "this is loopback: start rank 0 on this host, or give MASTER_ADDR its address"
        elif any(answer == REFUSED for answer in answers.values()):
            remedy = "nobody listens there: see that rank 0 runs, and that MASTER_ADDR is its host"
        elif any(answer.startswith("unreachable") for answer in answers.values()):
            remedy = "there is no way to that host: look at `ip route` and at the interfaces"
        yield Finding(ERROR, f"The store at {where} does not answer: {told}.", remedy)
    elif reached.loopback and len(machines(found)) > 1:
        sentence = f"MASTER_ADDR={reached.name} is a loopback address on some hosts."
        yield Finding(WARNING, sentence, "give it rank 0's address by number")


def absent(found: Findings) -> Iterator[Finding]:
    if found.excluded:
        sentence = f"{upper_first(ranks_text(found.ranks))} came when the others had given it up."
        yield Finding(ERROR, sentence, "start all ranks within some seconds")
        return
    missing = set(range(found.world)) - set(found.ranks)
    if missing and found.met and (found.called or not found.silent):
        sentence = f"{upper_first(ranks_text(missing))} never came."
        remedy = (
            "see the output there: was it started, with the same MASTER_ADDR, MASTER_PORT and "
            f"WORLD_SIZE={found.world}?"
        )
        yield Finding(ERROR, sentence, remedy)


def lost(found: Findings) -> Iterator[Finding]:
    for stage in sorted(set(found.lost.values())):
        ranks = [rank for rank, each in found.lost.items() if each == stage]
        sentence = f"{upper_first(ranks_text(ranks))} fell silent while {stage}."
        yield Finding(ERROR, sentence, "see the output there: the process or its host has ended")
    if found.silent:
        where = f"{found.reached.name}:{found.reached.port}"
        what = "" if found.called else " before all ranks were called"
        sentence = (
            f"The store at {where} took the connection of this rank and fell "
            f"silent{what}: {found.broken}."
        )
        remedy = (
            "see whether rank 0's process and host live, and whether a firewall between drops "
            "what comes on open connections"
        )
        yield Finding(ERROR, sentence, remedy)
    elif found.broken:
        yield Finding(
            ERROR,
            f"The examination ended early: {found.broken}.",
            "what is missing above was not found out; see whether rank 0's process lives",
        )


# ---- each rank by itself


def library(found: Findings) -> Iterator[Finding]:
    for error, ranks in by_value(found, lambda facts: facts.library_error).items():
        sentence = f"The library does not load on {ranks_text(ranks)}: {error}."
        yield Finding(ERROR, sentence, "install ringcomm there again, for the torch that is there")


def versions(found: Findings) -> Iterator[Finding]:
    groups = by_value(found, lambda facts: facts.build if facts.build != UNKNOWN else "")
    if len(groups) > 1:
        told = ", ".join(f"{build} on {ranks_text(ranks)}" for build, ranks in groups.items())
        sentence = f"Ranks have different builds of ringcomm: {told}."
        yield Finding(ERROR, sentence, "install the same version everywhere")
    for name in ("torch", "python"):
        groups = by_value(found, lambda facts: str(getattr(facts, name)))  # noqa: B023
        if len(groups) > 1:
            told = ", ".join(f"{each} on {ranks_text(ranks)}" for each, ranks in groups.items())
            yield Finding(WARNING, f"Ranks have different versions of {name}: {told}.",
                          "install the same everywhere")  # fmt: skip


def settings(found: Findings) -> Iterator[Finding]:
    from ringcomm.options import VARIABLES

    for name in ("RINGCOMM_FLOWS", "RINGCOMM_ALGORITHM", "RINGCOMM_SECRET"):
        groups = by_value(found, lambda facts: facts.settings.get(name, "(not set)"))  # noqa: B023
        if len(groups) > 1 and (name != "RINGCOMM_SECRET" or not any_secret_file(found)):
            told = ", ".join(f"{each} on {ranks_text(ranks)}" for each, ranks in groups.items())
            yield Finding(ERROR, f"{name} differs: {told}.", "set it to the same on every rank")
    for name in sorted({name for facts in found.ranks.values() for name in facts.settings}):
        if name not in VARIABLES and not name.startswith("RINGCOMM_SIM_"):
            ranks = [rank for rank, facts in found.ranks.items() if name in facts.settings]
            sentence = f"{name} is set on {ranks_text(ranks)}, and no such setting is known."
            yield Finding(WARNING, sentence, "docs/networks.md lists the settings")


def any_secret_file(found: Findings) -> bool:
    return any("RINGCOMM_SECRET_FILE" in facts.settings for facts in found.ranks.values())


def descriptors(found: Findings) -> Iterator[Finding]:
    for rank, facts in sorted(found.ranks.items()):
        text = facts.settings.get("RINGCOMM_FLOWS", "auto")
        flows = int(text) if text.isdigit() else 1  # auto: one, until more are useful
        local = sum(1 for each in found.ranks.values() if each.machine == facts.machine) - 1
        needed = local + flows * (found.world - 1 - local) + BESIDE
        limit, used = facts.descriptors_limit, facts.descriptors_open
        if limit < 0 or limit - max(used, 0) >= needed + 64:
            continue
        severity = ERROR if limit - max(used, 0) < needed else WARNING
        counted = f", of which {used} are in use" if used >= 0 else ""
        sentence = (
            f"{upper_first(on_host(facts, [rank]))} may open {limit} descriptors{counted}; "
            f"ringcomm needs {needed}."
        )
        yield Finding(severity, sentence, "set `ulimit -n 65536` before the program starts")


def secret_files(found: Findings) -> Iterator[Finding]:
    for rank, facts in sorted(found.ranks.items()):
        if facts.secret_error:
            said = f"Rank {rank} on {facts.host} cannot have the secret: {facts.secret_error}."
            yield Finding(ERROR, said, "see docs/safer.md on the file of the secret")


def memory(found: Findings) -> Iterator[Finding]:
    for ranks in machines(found).values():
        facts = found.ranks[ranks[0]]
        for error in sorted({found.ranks[rank].memfd_error for rank in ranks} - {""}):
            sentence = f"{facts.host} reserves no shared memory: {error}."
            yield Finding(ERROR, sentence, "see the limits of memory, and what seccomp forbids")
        free = facts.memory_available
        if facts.memory_limit >= 0:
            free = min(free, facts.memory_limit - facts.memory_used)
        if 0 <= free < LITTLE_MEMORY:
            sentence = f"{facts.host} has {free >> 20} MiB of memory left for {ranks_text(ranks)}."
            yield Finding(WARNING, sentence, "raise the limit of the cgroup, or start fewer ranks")
        if facts.oom_kills > 0:
            sentence = f"The OOM killer has ended {facts.oom_kills} processes of this cgroup."
            yield Finding(NOTE, f"{facts.host}: {sentence}", "see `dmesg` there")


def cores(found: Findings) -> Iterator[Finding]:
    for ranks in machines(found).values():
        facts = found.ranks[ranks[0]]
        if 0 < facts.cores < len(ranks):
            cores = f"{facts.cores:g} core{'s' * (facts.cores != 1)}"
            sentence = f"{facts.host} has {cores} for {ranks_text(ranks)}."
            yield Finding(NOTE, sentence, "more ranks than cores wait for one another")


def names(found: Findings) -> Iterator[Finding]:
    hosts: dict[str, list[list[int]]] = defaultdict(list)
    for ranks in machines(found).values():
        hosts[found.ranks[ranks[0]].host].append(ranks)
    for host, groups in hosts.items():
        if len(groups) > 1 and host != UNKNOWN:
            told = " and ".join(ranks_text(ranks) for ranks in groups)
            sentence = f"{len(groups)} hosts have one name, {host}: those of {told}."
            remedy = "ringcomm tells them apart, logs do not: `hostnamectl set-hostname` names one"
            yield Finding(WARNING, sentence, remedy)


def cuda(found: Findings) -> Iterator[Finding]:
    for ranks in machines(found).values():
        some = [found.ranks[rank] for rank in ranks]
        told = some[0].cuda
        if told.get("error"):
            yield Finding(WARNING, f"{some[0].host}: CUDA does not start: {told['error']}.",
                          "see `nvidia-smi` there, and the driver's version")  # fmt: skip
        elif told.get("driver") and not told.get("torch"):
            sentence = f"{some[0].host} has an NVIDIA driver, and a torch without CUDA."
            yield Finding(NOTE, sentence, "install torch with CUDA to use its GPUs")
        elif told.get("torch") and told.get("gpus") and not told.get("library"):
            sentence = f"{some[0].host} has GPUs, and a ringcomm that serves CPU tensors only."
            yield Finding(NOTE, sentence, "build it where nvcc is, with RINGCOMM_CUDA=on")
        if told.get("gpus") and not told.get("peers", True):
            sentence = f"Some GPUs of {some[0].host} cannot access one another's memory."
            yield Finding(NOTE, sentence, "their tensors go through memory of the host")
        apart = {(each.ipc_namespace, each.pid_namespace) for each in some}
        if told.get("gpus") and len(apart) > 1:
            sentence = f"{upper_first(ranks_text(ranks))} have different IPC or PID namespaces."
            remedy = "CUDA tensors go through the host: use `docker run --ipc=host --pid=host`"
            yield Finding(WARNING, sentence, remedy)
