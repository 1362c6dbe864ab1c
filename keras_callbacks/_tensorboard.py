"""Provides the base class of callbacks that report scalars of each epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication import runtime


class ScalarCallback(keras.callbacks.Callback):
    """Writes TensorBoard scalars on the first rank that trains, if `log_dir` is set."""

    def __init__(self, log_dir: str | os.PathLike[str] | None) -> None:
        super().__init__()
        self.log_dir = log_dir
        self._writer: Any = None

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        if self.log_dir and runtime.rank() == runtime.workers().ranks[0]:
            self._writer = tf.summary.create_file_writer(os.fspath(self.log_dir))

    @override
    def on_train_end(self, logs: Any = None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, prefix: str, values: Mapping[str, float], epoch: int) -> None:
        if self._writer is not None:
            with self._writer.as_default():
                for name, value in values.items():
                    tf.summary.scalar(f"{prefix}/{name}", value, step=epoch)
