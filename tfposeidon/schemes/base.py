"""The one abstraction: a scheme maps gradients and its own state to the mean gradient and new state.

`VectorScheme`s take gradients as they are, `FactorScheme`s as the product of two thin matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import tensorflow as tf

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.config import Configured
from tfposeidon.gradients.factors import Factors, FactorShape
from tfposeidon.schemes.cost import Cost

State = tuple[tf.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One float32 tensor that a scheme keeps from step to step; it starts at zero.

    Attributes:
      name: Says what it is.
      shape: `(n,)` for values of `n` elements of the bucket, `()` for a number that is the same on all ranks.
      offset: Where in the bucket these elements begin. What counts is the sum over all ranks that hold
        an element: it is kept when the number of ranks changes.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = 0


class Scheme(Configured, ABC):
    """How one bucket of gradients becomes the mean over all ranks: a `VectorScheme` or a `FactorScheme`.

    Subclasses are frozen, keyword-only dataclasses. They see neither variables nor learning rates,
    and keep nothing between calls: what has to last is `state`, which the optimizer stores.
    """

    name: ClassVar[str]
    """What users pass as `scheme=`, and what the plan prints."""

    has_gpu_kernels: ClassVar[bool] = True
    """Whether its native ops, if it has any, run on GPUs too."""

    def __str__(self) -> str:
        """The name, and the options that differ from their defaults."""
        shown = [f for f in fields(self) if f.repr]  # type: ignore[arg-type]
        options = [
            f"{f.name}={getattr(self, f.name)}" for f in shown if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(options)})" if options else self.name

    @property
    def exact(self) -> bool:
        """True if the result is the mean to rounding in the gradient's own dtype."""
        return True

    @property
    def min_length(self) -> int:
        """Variables with fewer elements are better sent densely."""
        return 0

    @property
    def for_small(self) -> Scheme | None:
        """What sends variables with fewer than `min_length` elements, if not `AllReduce`."""
        return None

    @property
    def corrects_momentum(self) -> bool:
        """True if it accumulates velocity itself, so that the optimizer must not."""
        return False

    def note(self, length: int, topology: Topology) -> str:
        """What it does in another way than its name says for a bucket of `length` elements; mostly nothing."""
        return ""

    def slots(self, length: int, topology: Topology) -> tuple[Slot, ...]:
        """What lasts from step to step for a bucket of `length` elements, on `topology.rank`."""
        return ()

    def rescaled(self, state: State, factor: tf.Tensor) -> State:
        """State whose gradients were `factor` times as large: after a change of learning rate or loss scale."""
        return state

    def flushing(self, state: State) -> State:
        """State with which all exchanges from now on send all that there is, so that nothing is left."""
        return state

    def has_flushed(self, state: State) -> bool:
        """Whether an exchange that counted has sent everything since `flushing`."""
        return True


class VectorScheme(Scheme):
    """A scheme for gradients as one vector, of one variable or of several."""

    @abstractmethod
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        """Exchanges one bucket.

        Args:
          gradient: `[n]` floating point, `n` static and the same on every rank; it is left as it is.
          state: Tensors of `slots`.
          wire: The collectives to use.
          name: Prefix for their names: unique per bucket, the same on every rank.

        Returns:
          The mean over all ranks, `[n]` in the gradient's dtype with the same bits on every rank, and
          the new state.
        """

    @abstractmethod
    def cost(self, length: int, itemsize: int, topology: Topology) -> Cost:
        """What `topology.rank` spends on `length` elements of `itemsize` bytes."""


class FactorScheme(Scheme):
    """A scheme for one variable whose gradient is a product of two thin matrices; it keeps nothing."""

    def fitted(self, factors: FactorShape, topology: Topology, load: list[float]) -> Scheme:
        """As it suits one variable: itself, another, or `ByRows`.

        Args:
          factors: Of the variable; with the rows of a step, where these are known.
          topology: The ranks of the job; what is decided is the same on each.
          load: Bytes that each rank serves already, to which are added those of this variable.
        """
        return self

    @abstractmethod
    def exchange_factors(self, factors: Factors, wire: Wire, name: str) -> tf.Tensor:
        """Exchanges the factors of one variable.

        Args:
          factors: Of this rank, on the wire's terms (`Factors.packed`); ranks may have different numbers of rows.
          wire: The collectives to use.
          name: Prefix for their names: unique per bucket, the same on every rank.

        Returns:
          The mean product over all ranks, `[M * N]` float32 with the same bits on every rank.
        """

    @abstractmethod
    def factor_cost(self, factors: FactorShape, topology: Topology) -> Cost:
        """What `topology.rank` spends where every rank has factors of this shape."""
