"""The row of the fault table that resets a connection after each byte of handshake and frames."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from lab import START
from lab.faults.table import Form, Verdict
from lab.limits import limit
from lab.ports import free_port

HELLO, CHALLENGE, PROOF = 88, 72, 168  # bytes of the handshake's messages (csrc/net/handshake.cc)
FRAMES = 2 * (64 + 400)  # then two frames, header and payload
GOOD = 4000  # bytes that a connection between two of these carries


def every_byte(form: Form) -> Verdict:
    """In turn, a connection that is reset at the next byte, and one that works for a while."""
    ways: list[tuple[int | None, int | None]] = []
    step = 1 if form.long else 29
    for offset in range(0, HELLO + PROOF + FRAMES, step):
        ways += [(offset, None), (GOOD, None)]
    for offset in range(0, CHALLENGE + PROOF + FRAMES, step):
        ways += [(None, offset), (None, GOOD)]
    ports = [free_port() for _ in range(3)]
    command = [sys.executable, "-m", "lab.faults.sweep_rank"]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RINGCOMM_TRANSPORT": "tcp",
        "RINGCOMM_IFNAME": "127.0.0.1",
    }
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *map(str, ports), json.dumps(ways)],
            env=env,
            cwd=START,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=limit(900 if form.long else 90))[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        return Verdict(False, "hangs")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode != 0 for rank in ranks):
        return Verdict(False, "; ".join(output.strip().splitlines()[-1] for output in outputs))
    told = json.loads(outputs[0].splitlines()[-1])
    resets = f"{len(ways) // 2} places, {told['operations']} operations, all exact"
    return Verdict(told["connections"] >= len(ways), resets)
