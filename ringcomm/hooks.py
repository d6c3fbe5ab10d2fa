"""The former name of `ringcomm.compression.hooks`; it goes with version 0.3."""

import warnings

from ringcomm.compression.hooks import *  # noqa: F403

warnings.warn("ringcomm.hooks is now ringcomm.compression.hooks", FutureWarning, stacklevel=2)
