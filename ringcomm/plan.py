"""The former name of `ringcomm.algorithms`; it goes with version 0.3."""

import warnings

from ringcomm.algorithms.language import *  # noqa: F403

warnings.warn("ringcomm.plan is now ringcomm.algorithms", FutureWarning, stacklevel=2)
