"""The one place for limits of time, and for what chance decides.

A limit ends what hangs; no test fails because a machine is slow or busy. So each is stated as the
seconds that are ample on an idle machine, and given as `limit(seconds)`, which is a multiple of it.
A timeout of a group that has to pass is not a limit, and stays as it is. A bound on speed, as an
error "within a second", is a `claim(seconds)`: it holds where a test runs alone.
"""

from __future__ import annotations

import os
import time

# A quarter of the speed, and a third busy process on two cores: six times as long, and to spare.
SLOWER = 8


def limit(seconds: float) -> float:
    """How long to wait before something that takes at most `seconds` is taken to hang."""
    return seconds * SLOWER


def claim(seconds: float) -> float:
    """A bound that is a claim about speed. It holds where somebody looks at speed: `make test-all`.

    Beside other tests, in the short form, and in the daily sample of long forms it is a limit.
    """
    guards = os.environ.get("RINGCOMM_TEST_LEVEL") in ("fast", "sample")
    return limit(seconds) if guards else seconds


def seed() -> int:
    """Return the seed of samples: another each day, or RINGCOMM_SEED to see one again."""
    return int(os.environ.get("RINGCOMM_SEED") or time.time() // 86400)
