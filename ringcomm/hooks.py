"""The name of `ringcomm.compression.hooks` from before 1.0."""

import warnings

from ringcomm.compression.hooks import *  # noqa: F403

warnings.warn("ringcomm.hooks is now ringcomm.compression.hooks", FutureWarning, stacklevel=2)
