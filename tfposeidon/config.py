"""Frozen dataclasses that Keras can save and load with the model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

import keras


class Configured:
    """Gives a dataclass Keras's `get_config` and `from_config`, and registers it under `tfposeidon>`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        keras.saving.register_keras_serializable("tfposeidon")(cls)

    def get_config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The inverse of `get_config`."""
        return cls(**config)
