"""A world's figures as a text that Prometheus reads, by way of node_exporter's textfile collector.

Rank 0 writes it, to the file RINGCOMM_ELASTIC_PROMETHEUS. The counters begin anew with a rank 0
that came later, as counters may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringcomm.elastic.stats import Stats

# The name, its kind, its text, and its value in the figures.
METRICS: tuple[tuple[str, str, str, Callable[[Stats], Any]], ...] = (
    ("epoch", "gauge", "How often the members have agreed on a change.", lambda s: s["epoch"]),
    ("step", "gauge", "Steps that were applied since the training began.", lambda s: s["step"]),
    (
        "steps_per_second",
        "gauge",
        "Steps a second, in the last ten seconds.",
        lambda s: s["steps_per_second"],
    ),
    ("members", "gauge", "Ranks that train.", lambda s: len(s["members"])),
    ("guests", "gauge", "Processes that are joining.", lambda s: len(s["guests"])),
    ("changes_total", "counter", "Changes of the members.", lambda s: s["changes"]),
    ("joined_total", "counter", "Members that joined.", lambda s: s["joined"]),
    ("lost_total", "counter", "Members that are gone, for any reason.", lambda s: s["lost"]),
    (
        "changes_seconds_total",
        "counter",
        "Seconds from failures, or votes, until the next group worked.",
        lambda s: s["seconds_lost"],
    ),
    (
        "last_change_seconds",
        "gauge",
        "How long the last change took.",
        lambda s: s["change_seconds"],
    ),
    (
        "aborted_steps_total",
        "counter",
        "Steps that did not count and were computed again.",
        lambda s: s["aborted"],
    ),
    (
        "lost_steps_total",
        "counter",
        "Steps that were applied and taken back.",
        lambda s: s["steps_lost"],
    ),
    (
        "sent_bytes_total",
        "counter",
        "Bytes of state that went to processes that joined.",
        lambda s: s["sent_bytes"],
    ),
    (
        "checkpoint_step",
        "gauge",
        "The step of the newest checkpoint.",
        lambda s: s["checkpoint"] and s["checkpoint"]["step"],
    ),
    (
        "checkpoint_timestamp_seconds",
        "gauge",
        "When the newest checkpoint was written, since 1970.",
        lambda s: s["checkpoint"] and s["checkpoint"]["at"],
    ),
    (
        "checkpoint_failures_total",
        "counter",
        "Checkpoints that could not be written.",
        lambda s: s["checkpoint_failures"],
    ),
)


def text_of(stats: Stats) -> str:
    """Return the text; what is not known has no line of its own."""
    lines = []
    for name, kind, text, value_of in METRICS:
        whole, value = f"ringcomm_elastic_{name}", value_of(stats)
        lines += [f"# HELP {whole} {text}", f"# TYPE {whole} {kind}"]
        if value is not None:
            lines.append(f"{whole} {value:.17g}")
    return "\n".join(lines) + "\n"
