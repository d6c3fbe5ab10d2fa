"""ringcomm: a torch.distributed backend.

Once installed, it needs no import: `torch.distributed.init_process_group("ringcomm")` finds it.
Importing it registers the backend too, for programs that turn torch's discovery off. Otherwise it
leaves torch alone until your program imports it, so that commands start at once.

The package has floors, and imports go down only:

- `ringcomm.tools`: the commands, which `__main__` starts. Nothing that runs inside a training
  process imports them.
- `ringcomm.elastic`, `ringcomm.compression`, `ringcomm.algorithms`: what a program may use beside
  torch's own interface.
- `_flight`: the flight records of a process.
- `_runtime`, `_network`: its settings and groups, and what it knows of the network.
- `options`, `_text`: the table of settings, and texts of sizes, times and ranks.
- `_C`: the engine, in C++ (csrc/). `_planner`: its plans and their proofs, without torch.
"""

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ringcomm._runtime import library
from ringcomm._runtime.registration import register, torch_registers

if TYPE_CHECKING:
    from ringcomm import algorithms as algorithms
    from ringcomm import compression as compression
    from ringcomm._flight.recorder import dump
    from ringcomm._flight.stats import metrics, stats
    from ringcomm._runtime.backend import backend_of
    from ringcomm._runtime.memory import empty
    from ringcomm._runtime.options import Options

__version__ = "1.0.0"
__all__ = [
    "Options",
    "__version__",
    "backend_of",
    "dump",
    "empty",
    "metrics",
    "stats",
]
# Loaded when you first ask for them, because they need torch, the library, and time.
_LATER = {
    "Options": "ringcomm._runtime.options",
    "backend_of": "ringcomm._runtime.backend",
    "dump": "ringcomm._flight.recorder",
    "empty": "ringcomm._runtime.memory",
    "metrics": "ringcomm._flight.stats",
    "stats": "ringcomm._flight.stats",
}
# Names from before 1.0, and where they are now (docs/stability.md).
_MOVED = {
    "AlgorithmError": "ringcomm.algorithms.AlgorithmError",
    "Drawing": "ringcomm.tools.plan.notebook.Drawing",
    "Simulation": "ringcomm.tools.plan.notebook.Simulation",
    "Story": "ringcomm.algorithms.Counterexample",
    "Sweep": "ringcomm.tools.plan.notebook.Sweep",
    "draw": "ringcomm.tools.plan.notebook.draw",
    "quantized_all_reduce": "ringcomm.compression.quantized_all_reduce",
    "register_algorithm": "ringcomm.algorithms.register_algorithm",
    "simulate": "ringcomm.tools.plan.notebook.simulate",
    "sweep": "ringcomm.tools.plan.notebook.sweep",
    "verify": "ringcomm.algorithms.verify",
}


def __getattr__(name: str) -> Any:
    if name == "_C":
        return library.load_library()
    if name in ("algorithms", "compression", "elastic"):
        return importlib.import_module(f"ringcomm.{name}")
    if name in _LATER:
        importlib.import_module("torch")  # which registers us at its end, with modules of its own
        return getattr(importlib.import_module(_LATER[name]), name)
    if name in _MOVED:
        warnings.warn(f"ringcomm.{name} is now {_MOVED[name]}", FutureWarning, stacklevel=2)
        module, _, now = _MOVED[name].rpartition(".")
        return getattr(importlib.import_module(module), now)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


library.load_recorder = lambda: importlib.import_module("ringcomm._flight.recorder")
if "torch" in sys.modules or not torch_registers():
    register()
