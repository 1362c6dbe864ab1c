"""Policies, which choose a scheme for each variable and give a reason."""

from typing import Any

from tfposeidon.policies.base import Choice, Policy, Uniform
from tfposeidon.policies.rules import POLICIES, Rules, parse
from tfposeidon.schemes import names

__all__ = [
    "POLICIES",
    "Choice",
    "Policy",
    "Rules",
    "Uniform",
    "parse",
]


def __getattr__(name: str) -> Any:
    return names.resolve(names.POLICIES, __name__, name)


def __dir__() -> list[str]:
    return [*__all__, *names.POLICIES]
