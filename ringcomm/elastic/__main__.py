"""`python -m ringcomm.elastic`, the name of `ringcomm elastic` from before 1.0."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    print("python -m ringcomm.elastic is now `ringcomm elastic`", file=sys.stderr)
    sys.argv[1:1] = ["elastic"]
    runpy.run_module("ringcomm", run_name="__main__")
