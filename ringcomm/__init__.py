"""ringcomm: a torch.distributed backend.

Installed, it needs no import: `torch.distributed.init_process_group("ringcomm")`. Importing it
registers the backend too, where torch's own way of finding backends is turned off.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ringcomm._autoload import load_library, register

if TYPE_CHECKING:
    from ringcomm._algorithms import register_algorithm
    from ringcomm._backend import backend_of
    from ringcomm._C import Options
    from ringcomm._flight import dump
    from ringcomm._program import AlgorithmError
    from ringcomm._stats import metrics, stats
    from ringcomm._verify import Story, verify
    from ringcomm.notebook import Drawing, Simulation, Sweep, draw, simulate, sweep
    from ringcomm.quantized import quantized_all_reduce

__version__ = "0.1.0"
"""The version, without that of the torch it was built for."""
__all__ = [
    "AlgorithmError",
    "Drawing",
    "Options",
    "Simulation",
    "Story",
    "Sweep",
    "__version__",
    "backend_of",
    "draw",
    "dump",
    "metrics",
    "quantized_all_reduce",
    "register_algorithm",
    "simulate",
    "stats",
    "sweep",
    "verify",
]
# Loaded when they are first asked for: they need torch and the library, and time.
LATER = {
    "AlgorithmError": "ringcomm._program",
    "Story": "ringcomm._verify",
    "verify": "ringcomm._verify",
    "Drawing": "ringcomm.notebook",
    "Simulation": "ringcomm.notebook",
    "Sweep": "ringcomm.notebook",
    "draw": "ringcomm.notebook",
    "simulate": "ringcomm.notebook",
    "sweep": "ringcomm.notebook",
    "backend_of": "ringcomm._backend",
    "dump": "ringcomm._flight",
    "metrics": "ringcomm._stats",
    "quantized_all_reduce": "ringcomm.quantized",
    "register_algorithm": "ringcomm._algorithms",
    "stats": "ringcomm._stats",
}


def __getattr__(name: str) -> Any:
    if name == "Options":
        return load_library().Options
    if name in LATER:
        return getattr(importlib.import_module(LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
