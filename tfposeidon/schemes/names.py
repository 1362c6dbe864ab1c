"""Resolves names of schemes, policies and planners that optional features define.

This is the only module of the core that refers to such a feature. It imports the feature when one
of its names is used, and omits the names of features that are not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any


def _installed(names: Mapping[str, str]) -> dict[str, str]:
    return {name: place for name, place in names.items() if find_spec(place.rpartition(".")[0])}


SCHEMES = _installed(
    {
        "ByRows": "tfposeidon.factors.schemes",
        "FactorPair": "tfposeidon.factors.pairs",
        "FactorScheme": "tfposeidon.factors.base",
        "FactorShape": "tfposeidon.factors.pairs",
        "Factors": "tfposeidon.factors.schemes",
    }
)
"""Module that defines each name that `tfposeidon.schemes` imports on use."""

POLICIES = _installed(
    {
        "Auto": "tfposeidon.autotune.planner",
        "HybComm": "tfposeidon.factors.schemes",
        "best_scheme_values": "tfposeidon.factors.schemes",
    }
)
"""Module that defines each name that `tfposeidon.policies` imports on use."""

PLANNERS = _installed({"AutoPlanner": "tfposeidon.autotune.planner"})
"""Module that defines the planner that predicts steps."""

_CLASSES = {"auto": "Auto", "factors": "Factors", "hybcomm": "HybComm"}
"""Names of classes, by the name that users pass as `scheme=`."""


def resolve(names: Mapping[str, str], package: str, name: str) -> Any:
    """Imports and returns an object by name, for `__getattr__` of a package."""
    if name not in names:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(names[name]), name)


def constructors(names: Mapping[str, str], package: str) -> dict[str, Callable[[], Any]]:
    """Returns constructors with default options, by the name that users pass as `scheme=`."""

    def constructor(name: str) -> Callable[[], Any]:
        return lambda: resolve(names, package, name)()

    return {short: constructor(name) for short, name in _CLASSES.items() if name in names}


def register_all() -> None:
    """Imports the installed features, so that Keras finds their classes when it loads a model."""
    for module in {*SCHEMES.values(), *POLICIES.values()}:
        importlib.import_module(module)
