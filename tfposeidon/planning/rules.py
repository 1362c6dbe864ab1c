"""Refuses optimizers, callbacks and changes that do not fit the schemes of a plan."""

from __future__ import annotations

from typing import Any

import keras

from tfposeidon.optimizers.layer_wise import LayerWiseOptimizer
from tfposeidon.optimizers.wrapping import innermost, leaves
from tfposeidon.planning.plan import Plan
from tfposeidon.policies import Policy

ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adam,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)
"""Optimizers whose rule updates each element by itself.

Not Keras's Lamb, Adafactor and Muon: these take norms, rows or products of whole variables.
"""


def check_server_update(policy: Policy, inner: Any) -> None:
    """Refuses to let servers update by a rule that needs whole variables, or may need them.

    Args:
      policy: Policy that decides whether servers update.
      inner: The optimizer inside `DistributedOptimizer`.

    Raises:
      ValueError: If servers update and the rule is not known to work on parts of variables.
    """
    if not policy.updates_at_servers:
        return
    optimizer = innermost(inner)
    # A list of rules, not `isinstance`: a subclass with a rule of its own may need whole variables.
    # Subclasses that change only their constructor keep the rule: AdamW has Adam's.
    rule = next(cls for cls in type(optimizer).__mro__ if "update_step" in vars(cls))
    # Norms of layers are summed over the servers' parts, by `exchange.layer_norms`.
    sums_norms = isinstance(optimizer, LayerWiseOptimizer)
    declared = getattr(optimizer, "updates_elementwise", False)
    if rule not in ELEMENTWISE and not sums_norms and not declared:
        names = ", ".join([*(cls.__name__ for cls in ELEMENTWISE), "LARS", "LAMB"])
        raise ValueError(
            f'update="server" gives the optimizer parts of variables, which {names} can work on. '
            f"Received: {type(optimizer).__name__}, whose rule needs whole variables, or is not "
            'known not to. Use ShardedServer(update="worker"), or, if each element is updated by '
            "itself, set updates_elementwise = True on the optimizer."
        )


def check_not_built(inner: Any) -> None:
    """Refuses an optimizer that has state already, which servers would have to cut.

    Args:
      inner: The optimizer inside `DistributedOptimizer`.

    Raises:
      ValueError: If it is built.
    """
    if inner.built:
        raise ValueError(
            'With update="server" the optimizer\'s state is made by DistributedOptimizer. '
            f"Received: {type(innermost(inner)).__name__}, built already. Pass a new one."
        )


def check_all_variables(given: list[Any], built: list[Any], served: bool) -> None:
    """Refuses updates of some variables only where each server's part was cut for all.

    Args:
      given: The variables of a call of `apply`.
      built: Variables that the optimizer was built for.
      served: True if servers update variables.

    Raises:
      ValueError: If servers update, and the two lists differ.
    """
    if served and [id(v) for v in given] != [id(v) for v in built]:
        raise ValueError(
            'With update="server" all variables are updated together. Received: gradients for '
            f"{len(given)} of {len(built)} variables, or in another order. Use an optimizer for "
            'each list, or update="worker".'
        )


def check_callbacks(policy: Policy, callbacks: list[Any]) -> None:
    """Refuses callbacks that use variables of the inner optimizer, where these are parts.

    Args:
      policy: Policy that decides whether servers update.
      callbacks: All callbacks of `fit`.

    Raises:
      ValueError: If servers update and there is a `keras.callbacks.SwapEMAWeights`.
    """
    if policy.updates_at_servers and any(
        isinstance(c, keras.callbacks.SwapEMAWeights) for c in callbacks
    ):
        raise ValueError(
            'With update="server" averages of weights lie with the servers. Received: '
            "SwapEMAWeights. Leave it out (at the end of fit the weights become their averages), "
            'or use update="worker".'
        )


def check_change(old: Policy, new: Policy) -> None:
    """Refuses a change of schemes to or from servers that update.

    Args:
      old: The policy so far.
      new: The policy of later steps.

    Raises:
      ValueError: If they differ, and servers update with one of them.
    """
    if old != new and (old.updates_at_servers or new.updates_at_servers):
        raise ValueError(
            'Schemes with update="server" stay for the whole training: the optimizer\'s state lies '
            f'with the servers. Received: a change from {old} to {new}. Use update="worker".'
        )


def check_momentum(plan: Plan, inner: Any) -> None:
    """Refuses momentum both before selection and after it.

    Args:
      plan: The plan that steps are to follow.
      inner: The optimizer inside `DistributedOptimizer`.

    Raises:
      ValueError: If a scheme corrects momentum and the optimizer has momentum, too.
    """
    corrected = {bucket.scheme.name for bucket in plan.buckets if bucket.scheme.corrects_momentum}
    moved = [leaf for leaf in leaves(inner) if getattr(leaf, "momentum", 0.0)]
    if corrected and moved:
        raise ValueError(
            "Momentum correction takes the place of the optimizer's momentum. Received: momentum "
            f"in {', '.join(sorted(corrected))} and in {type(moved[0]).__name__}. "
            "Use SGD(momentum=0.0)."
        )


def check_sparse_updates(plan: Plan, inner: Any) -> None:
    """Refuses schemes that send some elements only, before a rule that divides by means over rows.

    Raises:
      ValueError: If a scheme selects, and an optimizer inside is Keras's Adafactor.
    """
    sparse = {b.scheme.name for b in plan.buckets if getattr(b.scheme, "density", 1.0) < 1.0}
    if sparse and any(isinstance(leaf, keras.optimizers.Adafactor) for leaf in leaves(inner)):
        raise ValueError(
            "Adafactor divides by means over rows and columns, which are zero where nothing was "
            f"sent: weights become NaN. Received: Adafactor with {', '.join(sorted(sparse))}. Use "
            'Adam, or a scheme that sends everything, such as "asa16".'
        )
