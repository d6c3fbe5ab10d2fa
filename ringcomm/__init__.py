"""ringcomm: a torch.distributed backend.

Installed, it needs no import: `torch.distributed.init_process_group("ringcomm")`. Importing it
registers the backend too, where torch's own way of finding backends is turned off.
"""

from typing import TYPE_CHECKING, Any

from ringcomm._autoload import load_library, register

if TYPE_CHECKING:
    from ringcomm._C import Options

__version__ = "0.1.0"
__all__ = ["Options", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the library when `ringcomm.Options` is first asked for: it needs torch, and time."""
    if name == "Options":
        return load_library().Options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
