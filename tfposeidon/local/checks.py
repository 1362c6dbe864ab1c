"""What `LocalUpdates` refuses, and what it warns of."""

from __future__ import annotations

from typing import Any

from tfposeidon import policies
from tfposeidon.communication import runtime
from tfposeidon.local import rules

FEWEST_WITH_MOMENTUM = 8
"""Steps between rounds below which momentum inside and outside is known to do harm."""


def check_within(within: Any) -> None:
    """Refuses anything but nodes, and all ranks.

    Args:
      within: Value of the argument.

    Raises:
      ValueError: If it is neither `"node"` nor `None`.
    """
    if within not in ("node", None):
        raise ValueError(
            f'`within` must be "node" or None. Received: within={within!r}. Leave it out, and '
            "every rank trains by itself."
        )


def check_policy(policy: policies.Policy) -> None:
    """Refuses schemes that cannot carry differences of weights.

    Args:
      policy: Choice of schemes.

    Raises:
      ValueError: If it needs what differences do not have.
    """
    reasons = {
        "it is chosen by steps that exchange gradients": policy.leaves_open,
        "differences of weights have no factors": policy.reads_factors,
        "servers would update the weights": policy.updates_at_servers,
        "differences of weights have no velocity": policy.corrects_momentum,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ValueError(
                "`scheme` must be one that can carry differences of weights. Received: "
                f'scheme={policy}: {reason}. Use "2dtar" (the default), "allreduce", "asa16", '
                '"onebit" or "hitopk".'
            )


def check_nothing_counts_twice(rule: rules.Rule, policy: policies.Policy, keeps: bool) -> None:
    """Refuses to keep differences that are still there in the next round.

    Args:
      rule: What a round makes of the mean difference.
      policy: Choice of schemes.
      keeps: True if any scheme keeps something for later rounds.

    Raises:
      ValueError: If ranks stay apart and schemes keep something.
    """
    if keeps and rule.pull(2) < 1.0:
        raise ValueError(
            "Where ranks stay apart, what a scheme keeps for later rounds would count twice. "
            f"Received: rule={rule}, scheme={policy}. Use a scheme that keeps "
            'nothing ("2dtar", "allreduce", "asa16"), or rule="average".'
        )


def warn_of_momentum(rule: rules.Rule, inner: Any, every: int) -> None:
    """Says so where momentum inside and outside add up within few steps.

    Args:
      rule: What a round makes of the mean difference.
      inner: The inner optimizer.
      every: Steps from one round to the next.
    """
    if rule.momentum and rules.momentum_of(inner) and every < FEWEST_WITH_MOMENTUM:
        runtime.say(
            "tfposeidon: LocalUpdates(every=%d): with momentum inside (%g) and outside (%g), fewer "
            "than %d steps in a round are known to do harm. Give a larger `every`, or an inner "
            "optimizer without momentum.",
            every,
            rules.momentum_of(inner),
            rule.momentum,
            FEWEST_WITH_MOMENTUM,
        )
