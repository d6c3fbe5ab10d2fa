"""Flight records in the schema of PyTorch's flight recorder, for torch's own `torchfrtrace`.

`torchfrtrace` takes entries of backends that it knows, so ours say "gloo:". The key "ringcomm" of
a dump and of each entry tells the truth, and all that the schema has no place for.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ringcomm._flight.records import FIELDS, HEADER, GroupRecord, Operation
from ringcomm._planner import SHARDED

VERSION = "2.10"  # torch's schema
# torchfrtrace takes only these for names of a backend.
BACKEND = "gloo"
STATES = {"queued": "scheduled", "running": "started", "done": "completed", "failed": "started"}


def to_flight_recorder(
    records: Iterable[GroupRecord], since: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return the dump of one rank, of which these are all records.

    `since` has the first collective of each group that all ranks still have. Older ones are left
    out, for torchfrtrace would miss the others in them.
    """
    entries: list[dict[str, Any]] = []
    config, status, headers = {}, {}, []
    for index, (name, record) in enumerate(named(records)):
        headers.append({key: getattr(record, key) for key in HEADER})
        config[name] = {
            "name": name,
            "desc": described(record),
            "ranks": str([*record.global_ranks]),
        }
        status[name] = status_of(record)
        first = (since or {}).get(name, 0)
        messages: dict[str, int] = {}
        for operation in record.operations:
            if not operation.is_message and operation.sequence < first:
                continue
            entry = entry_of(operation, record, name)
            if operation.is_message and not place_message(
                entry, operation, record, messages, config
            ):
                continue
            facts = {key: getattr(operation, key) for key in FIELDS}
            identity = {"rank": record.rank, "global_rank": record.global_rank}
            entry["ringcomm"] = {**facts, **identity, "group": record.group, "record": index}
            entries.append(entry)
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for index, entry in enumerate(entries):
        entry["record_id"] = entry["op_id"] = index
    return {
        "version": VERSION,
        "pg_config": config,
        "pg_status": status,
        "entries": entries,
        "ringcomm": {"backend": "ringcomm", "records": headers},
    }


def named(records: Iterable[GroupRecord]) -> list[tuple[str, GroupRecord]]:
    """Name the groups of a rank: "0", and "0 (2)" for the second of that name."""
    groups: list[tuple[str, GroupRecord]] = []
    counts: dict[str, int] = {}
    for record in sorted(records, key=lambda record: (record.wall_ns, record.source)):
        counts[record.group] = count = counts.get(record.group, 0) + 1
        groups.append((record.group if count == 1 else f"{record.group} ({count})", record))
    return groups


def described(record: GroupRecord) -> str:
    return "default_pg" if record.group == "0" else "undefined"


def status_of(record: GroupRecord) -> dict[str, int]:
    """Return the last collective that this rank enqueued, started and completed; -1 for none."""
    own = [operation for operation in record.operations if not operation.is_message]

    def last(states: set[str]) -> int:
        return max((op.sequence for op in own if op.state in states), default=-1)

    return {
        "last_enqueued_collective": last({*STATES}),
        "last_started_collective": last({"running", "done", "failed"}),
        "last_completed_collective": last({"done"}),
    }


def entry_of(operation: Operation, record: GroupRecord, name: str) -> dict[str, Any]:
    shift = record.wall_ns - record.steady_ns
    times = (operation.called_ns, operation.began_ns, operation.ended_ns)
    called, began, ended = (None if ns is None else ns + shift for ns in times)
    whole, part = [operation.elements], [operation.elements // record.size]
    collective = operation.collective
    if collective in SHARDED and operation.splits:
        part = whole  # the schema has one size for all ranks
        collective = {"all_gather": "all_gather_v", "reduce_scatter": "reduce_scatter_v"}.get(
            collective, collective
        )
    gathers = collective in ("all_gather", "gather")
    return {
        "pg_id": record.global_ranks[0],
        "process_group": (name, described(record)),
        "collective_seq_id": operation.sequence,
        "p2p_seq_id": 0,
        "is_p2p": operation.is_message,
        "profiling_name": f"{BACKEND}:{collective}",
        "ringcomm:name": f"ringcomm:{operation.collective}",
        "input_sizes": [part if gathers else whole],
        "output_sizes": [part if collective in ("reduce_scatter", "scatter") else whole],
        "input_dtypes": [operation.dtype],
        "output_dtypes": [operation.dtype],
        "state": STATES[operation.state],
        "time_created_ns": called or record.wall_ns,
        "time_discovered_started_ns": began,
        "time_discovered_completed_ns": ended,
        "retired": operation.is_done,
        "timeout_ms": 0,
        "frames": frames_of(operation),
    }


def frames_of(operation: Operation) -> list[dict[str, Any]]:
    place, _, function = operation.line.rpartition(" in ")
    file, _, line = place.rpartition(":")
    return [{"name": function, "filename": file, "line": int(line)}] if line.isdigit() else []


def place_message(
    entry: dict[str, Any],
    operation: Operation,
    record: GroupRecord,
    messages: dict[str, int],
    config: dict[str, Any],
) -> bool:
    """Give a message a group of its two ranks; return False where torchfrtrace has no use for it.

    torchfrtrace expects all ranks of a group in every entry, and pairs by number alone. So each
    direction and tag is a group of its own, whose messages are counted. Those from any rank, and
    those of a record that has lost its oldest, cannot be counted. Puts and signals are no messages
    to it.
    """
    peer = operation.root
    if peer is None or peer == record.rank or record.lost or operation.window is not None:
        return False
    sending = operation.collective == "send"
    source, target = (record.rank, peer) if sending else (peer, record.rank)
    ends = [record.global_ranks[source], record.global_ranks[target]]
    name = f"{entry['process_group'][0]} tag {operation.splits} from {ends[0]} to {ends[1]}"
    config[name] = {"name": name, "desc": "undefined", "ranks": str(sorted(ends))}
    messages[name] = messages.get(name, 0) + 1
    first, second = (0, 1) if ends[0] < ends[1] else (1, 0)
    way = f"send {first}->{second}" if sending else f"recv {second}<-{first}"
    entry["process_group"] = (name, "undefined")
    entry["profiling_name"] = f"{BACKEND}:{way}"
    entry["collective_seq_id"] = entry["p2p_seq_id"] = messages[name]
    return True


def since_of(records: Iterable[GroupRecord]) -> dict[str, int]:
    """Return the first collective of each group that every rank with a record still has."""
    ranks: dict[int, list[GroupRecord]] = {}
    for record in records:
        ranks.setdefault(record.global_rank, []).append(record)
    since: dict[str, int] = {}
    for own in ranks.values():
        for name, record in named(own):
            kept = [op.sequence for op in record.operations if not op.is_message]
            if record.lost and kept:
                since[name] = max(since.get(name, 0), min(kept))
    return since


def write_flight_recorder(records: Iterable[GroupRecord], folder: Path) -> list[Path]:
    """Write `rank_<N>` for each rank. Raises OSError."""
    every = list(records)
    folder.mkdir(parents=True, exist_ok=True)
    since = since_of(every)
    paths = []
    for rank in sorted({record.global_rank for record in every}):
        own = [record for record in every if record.global_rank == rank]
        paths.append(folder / f"rank_{rank}")
        paths[-1].write_bytes(pickle.dumps(to_flight_recorder(own, since)))
    return paths
