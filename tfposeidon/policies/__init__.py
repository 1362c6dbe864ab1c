"""Policies, which choose a scheme for each variable and give a reason."""

from tfposeidon.policies.auto import Auto, Considered
from tfposeidon.policies.base import Choice, Policy, Uniform
from tfposeidon.policies.hybcomm import HybComm, best_scheme_values
from tfposeidon.policies.rules import POLICIES, Rules, parse

__all__ = [
    "POLICIES",
    "Auto",
    "Choice",
    "Considered",
    "HybComm",
    "Policy",
    "Rules",
    "Uniform",
    "best_scheme_values",
    "parse",
]
