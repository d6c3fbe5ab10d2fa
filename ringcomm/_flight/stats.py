"""Numbers of what this rank's groups have done so far."""

from __future__ import annotations

from typing import Any

from ringcomm._flight.records import GroupRecord, read_ring
from ringcomm._runtime.library import load_library

METRICS = {  # name: (what it is, type)
    "ringcomm_operations_total": ("Operations that ended well.", "counter"),
    "ringcomm_bytes_total": (
        "Bytes of these operations: of the larger of input and output.",
        "counter",
    ),
    "ringcomm_seconds_total": ("Seconds that these operations took.", "counter"),
    "ringcomm_wait_seconds_total": ("Seconds that operations waited for a peer.", "counter"),
    "ringcomm_sent_bytes_total": ("Bytes sent to other hosts.", "counter"),
    "ringcomm_resent_frames_total": ("Frames sent again after a lost connection.", "counter"),
    "ringcomm_lost_connections_total": ("Connections that were lost and made again.", "counter"),
    "ringcomm_failed": ("1 where the group has failed.", "gauge"),
}


def stats(group: Any = None, *, flat: bool = False) -> dict[str, Any]:
    """Return what this rank has done in a group, the default one if none is given.

    The dictionary has `group`, `rank`, `size`, `device` (whether it is about tensors of a GPU) and
    `failure` (the text, or ""), and these figures. `operations`, by collective, has `operations`
    that ended well, their `bytes` (of the larger of input and output) and `seconds`. `waits` has
    seconds for each peer, by its global rank; waits that the spinning thread hardly noticed are not
    in it. `sent_bytes` went to other hosts, and `resent_frames` were sent again after so many
    `lost_connections`; these count all groups. Operations on a GPU are counted by the host, when
    it sees their end. `flat`: only the numbers, by names such as "ringcomm/all_reduce/seconds",
    for a logger: `wandb.log(ringcomm.stats(flat=True))`. Raises ValueError for a group that is not
    ringcomm's, and RuntimeError without torch's default group.
    """
    import torch.distributed as dist

    wanted = group if group is not None else dist.group.WORLD
    if wanted is None:
        raise RuntimeError("there is no default group: call init_process_group first")
    own = [numbers for numbers in every() if numbers["group"] == wanted.group_name]
    if not own:
        raise ValueError(f"group '{wanted.group_name}' is not ringcomm's, or was destroyed")
    whole = own[0]
    for more in own[1:]:  # the device's records
        add(whole, more)
    return flattened(whole) if flat else whole


def flattened(numbers: dict[str, Any], prefix: str = "ringcomm") -> dict[str, float]:
    """Return the numbers of a dictionary of dictionaries by their paths, without texts."""
    flat: dict[str, float] = {}
    for key, value in numbers.items():
        if isinstance(value, dict):
            path = prefix if key == "operations" else f"{prefix}/{key}"
            flat |= flattened(value, path)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"{prefix}/{key}"] = value
    return flat


def add(whole: dict[str, Any], more: dict[str, Any]) -> None:
    for name, figures in more["operations"].items():
        mine = whole["operations"].setdefault(name, dict.fromkeys(figures, 0))
        for key, value in figures.items():
            mine[key] += value
    for rank, seconds in more["waits"].items():
        whole["waits"][rank] += seconds
    for key in ("sent_bytes", "resent_frames", "lost_connections"):
        whole[key] += more[key]
    whole["failure"] = whole["failure"] or more["failure"]


def every() -> list[dict[str, Any]]:
    """Return the numbers of all groups of this process; those of a device are apart."""
    return [numbers_of(read_ring(ring, newest=0)) for ring in load_library().flight_rings()]


def numbers_of(record: GroupRecord) -> dict[str, Any]:
    sent, resent, broken = record.traffic
    waits = {
        peer: wait * 1e-9
        for peer, wait in zip(record.global_ranks, record.waits_ns, strict=True)
        if peer != record.global_rank
    }
    return {
        "group": record.group,
        "rank": record.rank,
        "size": record.size,
        "device": record.device,
        "failure": record.failure,
        "operations": {name: total._asdict() for name, total in record.totals.items()},
        "waits": waits,
        "sent_bytes": sent,
        "resent_frames": resent,
        "lost_connections": broken,
    }


def metrics() -> str:
    """Return the numbers of all groups of this process, as a text that Prometheus reads.

    They are counters in operations, bytes and seconds, with the labels `group`, `rank`, `memory`
    ("host" or "device") and `collective` or `peer`. "# HELP" lines say what each is. Without a
    group there are only these lines.
    """
    rows: dict[str, list[str]] = {name: [] for name in METRICS}

    def row(name: str, value: float, **labels: object) -> None:
        words = ",".join(f'{key}="{escaped(str(text))}"' for key, text in labels.items())
        rows[name].append(f"{name}{{{words}}} {value:.17g}")

    for numbers in every():
        whose = {"group": numbers["group"], "rank": numbers["rank"]}
        whose["memory"] = "device" if numbers["device"] else "host"
        for collective, figures in numbers["operations"].items():
            for key in ("operations", "bytes", "seconds"):
                row(f"ringcomm_{key}_total", figures[key], **whose, collective=collective)
        for peer, seconds in numbers["waits"].items():
            row("ringcomm_wait_seconds_total", seconds, **whose, peer=peer)
        row("ringcomm_sent_bytes_total", numbers["sent_bytes"], **whose)
        row("ringcomm_resent_frames_total", numbers["resent_frames"], **whose)
        row("ringcomm_lost_connections_total", numbers["lost_connections"], **whose)
        row("ringcomm_failed", int(bool(numbers["failure"])), **whose)
    parts = []
    for name, (text, kind) in METRICS.items():
        parts += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *rows[name]]
    return "\n".join(parts) + "\n"


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
