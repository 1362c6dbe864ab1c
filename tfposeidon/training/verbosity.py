"""Meaning of `verbose="auto"` where no progress bar can be shown."""

from __future__ import annotations

import os
import sys
from typing import Any

import keras

ONE_LINE_PER_EPOCH = 2
"""Value of Keras's `verbose` for one line per epoch."""


def resolve(verbose: Any) -> Any:
    """Returns 2 for `"auto"` where no progress bar can be shown, and else `verbose` itself.

    >>> resolve(1), resolve(0)
    (1, 0)
    """
    # Keras takes `"auto"` for 1, a progress bar, everywhere. A pipe or file records the bar's
    # backspaces and carriage returns, so that an epoch fills pages under `horovodrun`.
    return ONE_LINE_PER_EPOCH if verbose == "auto" and not _shows_progress_bars() else verbose


def _shows_progress_bars() -> bool:
    # Without interactive logging Keras sends its output to absl's log, line by line.
    if not keras.config.is_interactive_logging_enabled():
        return False
    # Notebooks and PyCharm show the bar without a terminal. Keras's own progress bar detects them
    # by the same signs.
    if "ipykernel" in sys.modules or "PYCHARM_HOSTED" in os.environ:
        return True
    return bool(getattr(sys.stdout, "isatty", bool)())
