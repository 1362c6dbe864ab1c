"""TensorBoard scalars of callbacks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfposeidon.communication import runtime


class ScalarWriter:
    """Writer of TensorBoard scalars; only the first worker writes, and only if `log_dir` is set."""

    def __init__(self, log_dir: str | os.PathLike[str] | None) -> None:
        self._log_dir = log_dir
        self._writer: Any = None

    def open(self) -> None:
        """Opens an event file on the first rank that trains."""
        if self._log_dir and runtime.rank() == runtime.workers().ranks[0]:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        """Writes scalars by tag ("cache/hits") at a step, which is the epoch in callbacks."""
        if self._writer is None:
            return
        with self._writer.as_default():
            for tag, value in scalars.items():
                tf.summary.scalar(tag, value, step=step)

    def close(self) -> None:
        """Flushes and closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
