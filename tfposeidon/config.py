"""Defines the base class of frozen dataclasses that Keras saves and loads with a model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

import keras


class Configured:
    """Base class of frozen dataclasses that Keras saves with a model.

    Keras registers classes of this package under `tfposeidon`, and other classes under their
    module. `my_schemes.dense>AllReduce` therefore replaces neither this package's `AllReduce` nor a
    class of the same name in another module.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class Limit(Configured):
    ...     rows: int = 3
    >>> keras.saving.serialize_keras_object(Limit(5))["config"]
    {'rows': 5}
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `@dataclass` runs after this method and returns the registered class, unless `slots=True`.
        is_ours = cls.__module__.partition(".")[0] == "tfposeidon"
        keras.saving.register_keras_serializable("tfposeidon" if is_ours else cls.__module__)(cls)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, which Keras serializes."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates an object from the result of `get_config`."""
        return cls(**{name: _with_tuples(value) for name, value in config.items()})


def _with_tuples(value: Any) -> Any:
    """Deserializes a value, and turns lists into tuples, because JSON lists are not hashable."""
    if isinstance(value, list | tuple):
        return tuple(map(_with_tuples, value))
    return keras.saving.deserialize_keras_object(value)
