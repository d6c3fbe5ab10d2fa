from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend

class Options(Backend.Options):
    """What a user may say about a group: `init_process_group("ringcomm", pg_options=Options())`."""

    def __init__(self, timeout: timedelta = ...) -> None: ...

def create_backend(options: Any, backend_options: Options | None) -> Any:
    """Make the c10d::Backend of one group from torch's _DistributedBackendOptions."""
