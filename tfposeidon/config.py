"""Frozen dataclasses that Keras can save and load with the model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

import keras


class Configured:
    """Base of frozen dataclasses that Keras saves with a model.

    They are registered under the package `tfposeidon`, or the module of a user that defines them:
    `my_schemes.dense>AllReduce` replaces none of ours, and no other of the user's.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Limit(Configured):
    ...     rows: int = 3
    >>> keras.saving.serialize_keras_object(Limit(5))["config"]
    {'rows': 5}
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `@dataclass` runs later, but returns the registered class itself (`slots=True` would not).
        is_ours = cls.__module__.partition(".")[0] == "tfposeidon"
        keras.saving.register_keras_serializable("tfposeidon" if is_ours else cls.__module__)(cls)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, which Keras serializes."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes an object from what `get_config` returned.

        Args:
          config: Arguments of the constructor, by name, as Keras has serialized them.

        Returns:
          A new object with these arguments.
        """
        return cls(**{name: _with_tuples(value) for name, value in config.items()})


def _with_tuples(value: Any) -> Any:
    """Returns what Keras has serialized; JSON has made lists of tuples, and lists have no hash."""
    if isinstance(value, list | tuple):
        return tuple(map(_with_tuples, value))
    return keras.saving.deserialize_keras_object(value)
