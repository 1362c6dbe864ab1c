"""Variables that are excluded from layer-wise scaling."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from tfposeidon.gradients.description import path_of

Exclude = Sequence[str] | Callable[[Any], bool] | None
"""Type of the argument `exclude` of `LARS` and `LAMB`."""

# Only the last word of the path counts, so that "unbiased_head/kernel" is not excluded. Paths are
# needed because biases may have two axes (GRU, MultiHeadAttention), as may gamma and beta
# (LayerNormalization over two axes).
_SCALE_OR_SHIFT = re.compile(r"(^|[/_.])(bias|gamma|beta)(:\d+)?$")


class Exclusion:
    """Rule for the excluded variables, as in the argument `exclude` of `LARS`.

    >>> import keras
    >>> kernel, bias = keras.Variable([[1.0]], name="kernel"), keras.Variable([1.0], name="bias")
    >>> Exclusion(None).indices([kernel, bias]), Exclusion(["kernel"]).indices([kernel, bias])
    (frozenset({1}), frozenset({0}))
    """

    def __init__(self, rule: Exclude) -> None:
        self._rule = rule if rule is None or callable(rule) else _checked(rule)

    def indices(self, variables: Sequence[Any]) -> frozenset[int]:
        """Returns the indices of the excluded variables, and warns of patterns without a match."""
        rule = is_scale_or_shift if self._rule is None else self._rule
        # A shard owner holds a flat part of a variable. The rule applies to shape and path of the
        # whole variable.
        variables = [getattr(variable, "whole", variable) for variable in variables]
        if callable(rule):
            indices = frozenset(index for index, variable in enumerate(variables) if rule(variable))
            # The default rule may match nothing: a model without biases is valid.
            if self._rule is not None and variables and not indices:
                what = f"is a function that excludes no variable: {_name_of(rule)}"
                _warn_unused(what, "Correct the function, or use [].", variables)
            return indices
        found = {pattern: _indices_with(pattern, variables) for pattern in rule}
        unused = [repr(pattern) for pattern, indices in found.items() if not indices]
        if unused:
            what = f"has patterns that match no variable's path: {', '.join(unused)}"
            _warn_unused(what, "Correct the patterns, or leave them out.", variables)
        return frozenset[int]().union(*found.values())

    def get_config(self) -> list[str] | None:
        """Returns the rule in a form that JSON supports; refuses a function."""
        if callable(self._rule):
            raise ValueError(
                "`exclude` must be None or a list of patterns when the optimizer is saved. "
                f"Received: the function {_name_of(self._rule)}, which cannot be saved in a file. "
                "Use patterns that match the paths of the same variables, or save only the "
                "weights (save_weights, keras_callbacks.Checkpoint)."
            )
        return None if self._rule is None else list(self._rule)


def is_scale_or_shift(variable: Any) -> bool:
    """Returns whether a variable is a bias or a parameter of a normalization layer."""
    return len(variable.shape) <= 1 or _SCALE_OR_SHIFT.search(path_of(variable)) is not None


def _checked(patterns: Any) -> tuple[str, ...]:
    if not isinstance(patterns, list | tuple) or not all(
        isinstance(pattern, str) for pattern in patterns
    ):
        raise ValueError(
            "`exclude` must be None, a list of patterns, or a function of a variable. Received: "
            f'exclude={patterns!r}. Use for example ["bias", "gamma", "beta"], or [] to exclude '
            "nothing."
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"`exclude` must hold regular expressions. Received: exclude={patterns!r}, in "
                f"which {pattern!r} is invalid: {error}. Escape it with re.escape."
            ) from error
    return tuple(patterns)


def _indices_with(pattern: str, variables: Sequence[Any]) -> frozenset[int]:
    return frozenset(
        index for index, variable in enumerate(variables) if re.search(pattern, path_of(variable))
    )


def _name_of(rule: Callable[[Any], bool]) -> str:
    return getattr(rule, "__qualname__", repr(rule))


def _warn_unused(what: str, remedy: str, variables: Sequence[Any]) -> None:
    paths = ", ".join(repr(path_of(variable)) for variable in variables[:3])
    warnings.warn(
        f"`exclude` {what}. Examples of paths: {paths}. {remedy}", UserWarning, stacklevel=3
    )
