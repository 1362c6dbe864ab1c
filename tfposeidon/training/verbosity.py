"""Meaning of `verbose="auto"` where no progress bar can be shown."""

from __future__ import annotations

import os
import sys
from typing import Any

import keras

ONE_LINE_PER_EPOCH = 2
"""Value of `verbose` for which Keras does so."""


def resolve(verbose: Any) -> Any:
    """Returns 2 for `"auto"` where no progress bar can be shown, and else `verbose` itself.

    Keras takes `"auto"` for 1, a progress bar, wherever it runs. The bar moves by backspaces and
    carriage returns, which a pipe or a file keeps: under `horovodrun` an epoch becomes pages of
    them.

    Args:
      verbose: Value of `verbose` as given to `fit`.

    >>> resolve(1), resolve(0)
    (1, 0)
    """
    return ONE_LINE_PER_EPOCH if verbose == "auto" and not _shows_progress_bars() else verbose


def _shows_progress_bars() -> bool:
    # Without interactive logging Keras sends its output to absl's log, line by line.
    if not keras.config.is_interactive_logging_enabled():
        return False
    # Notebooks and PyCharm show the bar without being terminals. Keras's own progress bar knows
    # them by these signs.
    if "ipykernel" in sys.modules or "PYCHARM_HOSTED" in os.environ:
        return True
    return bool(getattr(sys.stdout, "isatty", bool)())
