"""Scalars of callbacks for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfposeidon.communication import runtime


class ScalarWriter:
    """Writer of TensorBoard scalars; only the first rank that trains writes.

    Args:
      log_dir: Folder of the event files; `None` writes nothing.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None) -> None:
        self._log_dir = log_dir
        self._writer: Any = None

    def open(self) -> None:
        """Opens an event file on the first rank that trains."""
        if self._log_dir and runtime.rank() == runtime.workers().ranks[0]:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Writes one point of each curve.

        Args:
          scalars: Value by tag ("cache/hits").
          step: Index on the horizontal axis; callbacks give the epoch.
        """
        if self._writer is None:
            return
        with self._writer.as_default():
            for tag, value in scalars.items():
                tf.summary.scalar(tag, value, step=step)

    def close(self) -> None:
        """Writes what is buffered and closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
