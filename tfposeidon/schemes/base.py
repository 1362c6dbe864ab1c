"""The one abstraction: a scheme maps gradients and its own state to the mean gradient and new state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import ClassVar

import tensorflow as tf

from tfposeidon.config import Configured
from tfposeidon.cost import Cost
from tfposeidon.topology import Topology
from tfposeidon.wire import Wire

State = tuple[tf.Tensor, ...]


class Scheme(Configured, ABC):
    """How one bucket of gradients becomes the mean over all ranks.

    Subclasses are frozen, keyword-only dataclasses. They see neither variables nor learning rates,
    and keep nothing between calls: what has to last is `state`, which the optimizer stores.
    """

    name: ClassVar[str]
    """What users pass as `scheme=`, and what the plan prints."""

    def __str__(self) -> str:
        """The name, and the options that differ from their defaults."""
        options = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{self.name}({', '.join(options)})" if options else self.name

    @property
    def exact(self) -> bool:
        """True if the result is the mean to rounding in the gradient's own dtype."""
        return True

    def state_shapes(self, length: int, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """Shapes of the float32 tensors that last from step to step for a bucket of `length` elements.

        They start at zero, differ from rank to rank, and depend on nothing but these arguments.
        """
        return ()

    @abstractmethod
    def exchange(self, gradient: tf.Tensor, state: State, wire: Wire, name: str) -> tuple[tf.Tensor, State]:
        """Exchanges one bucket.

        Args:
          gradient: `[n]` floating point, `n` static and the same on every rank; it is left as it is.
          state: Tensors of `state_shapes`.
          wire: The collectives to use.
          name: Prefix for their names: unique per bucket, the same on every rank.

        Returns:
          The mean over all ranks, `[n]` in the gradient's dtype with the same bits on every rank, and
          the new state.
        """

    @abstractmethod
    def cost(self, length: int, itemsize: int, topology: Topology) -> Cost:
        """What `topology.rank` spends on `length` elements of `itemsize` bytes."""
