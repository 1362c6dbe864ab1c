"""The one abstraction: a scheme maps gradients and its state to the mean gradient and new state.

A `VectorScheme` takes gradients as they are, a `FactorScheme` as the product of two thin matrices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.config import Configured
from tfposeidon.gradients.description import Description
from tfposeidon.gradients.factors import FactorPair, FactorShape
from tfposeidon.schemes.cost import Cost, Stage, renamed, total_cost

State = tuple[tf.Tensor, ...]
"""State of a scheme for one bucket: a tensor for each of its slots, in their order."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One float32 tensor that a scheme keeps from step to step; it starts at zero.

    Attributes:
      name: Noun for the values, such as `"residual"`.
      shape: `(n,)` for values of `n` elements of the bucket, `()` for a number that is the same on
        all ranks.
      offset: Index in the bucket of the first of these elements. What counts is the sum over all
        ranks that hold an element: it is kept when the number of ranks changes.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = 0


class Scheme(Configured, ABC):
    """Method by which one bucket of gradients becomes the mean over all ranks.

    Subclasses are frozen, keyword-only dataclasses. They see neither variables nor learning rates,
    and keep nothing between calls: what has to last is `state`, which the optimizer stores.

    Policies, plans and exchanges ask for the properties declared here, not for the class: a new
    scheme overrides those in which it differs. Its options have hashes, and are what ranks compare
    and what is saved with a model; to load one, Python must have imported the scheme's module.

    Example:
      >>> from tfposeidon import schemes
      >>> scheme = schemes.AllToAll(wire_dtype="float16")
      >>> isinstance(scheme, schemes.Scheme), str(scheme), scheme.exact
      (True, 'alltoall(wire_dtype=float16)', False)
    """

    name: ClassVar[str]
    """Name that plans print; where a class has none of its own, that of the class in lower case."""

    needs_factors: ClassVar[bool] = False
    """True if it can exchange only gradients that are products of two thin matrices."""

    takes_factors: ClassVar[bool] = False
    """True if it is given the factors of gradients, of which it may still make their products."""

    averages: ClassVar[bool] = True
    """False if its result is no mean, so that samples do not weigh."""

    loads_evenly: ClassVar[bool] = True
    """True if nodes of one size send and receive as much as each other."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = vars(cls).get("name", cls.__name__.lower())

    def __str__(self) -> str:
        """Returns the name, and the options that differ from their defaults."""
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
        """Number of elements below which a variable is better sent by another scheme."""
        return 0

    @property
    def for_small_variables(self) -> Scheme | None:
        """Scheme for variables with fewer than `min_length` elements; `None` means `AllReduce`."""
        return None

    @property
    def corrects_momentum(self) -> bool:
        """True if it accumulates velocity itself, so that the optimizer must not."""
        return False

    # ------------------------------------------------------------------ planning

    def fitted(self, factors: FactorShape, topology: Topology) -> Scheme:
        """Returns the scheme that suits one variable: this one, or another in its place.

        Args:
          factors: Shape of the variable's factors; with the rows of a step, where these are known.
          topology: The ranks of the job; the result is the same on each.
        """
        return self

    def for_rows(self, rows: float) -> Scheme:
        """Returns the scheme that a step follows, where that depends on the number of rows.

        Args:
          rows: Rows of one variable's factors, summed over all ranks.
        """
        return self

    @abstractmethod
    def bucket_stages(
        self, length: int, itemsize: int, factors: Sequence[FactorShape], topology: Topology
    ) -> tuple[Stage, ...]:
        """Describes what `topology.rank` does for one bucket.

        Args:
          length: Elements of all variables of the bucket.
          itemsize: Bytes of an element.
          factors: Shape of each variable's factors; ignored by schemes that exchange vectors.
          topology: The ranks of the job.

        Returns:
          Transfers and local work, one after the other.
        """

    def bucket_cost(
        self, length: int, itemsize: int, factors: Sequence[FactorShape], topology: Topology
    ) -> Cost:
        """Predicts what `topology.rank` spends on one bucket.

        Args:
          length: Elements of all variables of the bucket.
          itemsize: Bytes of an element.
          factors: Shape of each variable's factors; ignored by schemes that exchange vectors.
          topology: The ranks of the job.

        Returns:
          Predicted cost of one exchange of the bucket: payload without headers.
        """
        return total_cost(self.bucket_stages(length, itemsize, factors, topology), topology)

    def note(self, length: int, topology: Topology) -> str:
        """Returns what the scheme does in another way than its name says; mostly nothing.

        Args:
          length: Elements of the bucket.
          topology: The ranks of the job.
        """
        return ""

    # ------------------------------------------------------------------ exchange

    @abstractmethod
    def exchange_products(
        self, factors: Sequence[FactorPair], rows: tf.Tensor, dtype: str, wire: Wire, name: str
    ) -> tf.Tensor:
        """Exchanges a bucket of gradients that are given as factors.

        Args:
          factors: Factors of this rank, one for each variable.
          rows: Rows of all variables and all ranks together, a float32 scalar.
          dtype: Dtype of the result.
          wire: The collectives to use.
          name: Prefix of the names of collectives: unique per bucket, the same on every rank.

        Returns:
          The mean products over all ranks, one after the other, `[n]` in `dtype` with the same
          bits on every rank.
        """

    def unpack(
        self, mean: tf.Tensor, descriptions: Sequence[Description], topology: Topology
    ) -> list[tf.Tensor]:
        """Splits a bucket that was exchanged into its variables.

        Args:
          mean: Result of the exchange, `[n]`.
          descriptions: Descriptions of the bucket's gradients.
          topology: The ranks of the job.

        Returns:
          A tensor for each variable, by default in its shape.
        """
        lengths = [d.length for d in descriptions]
        parts = tf.split(mean, lengths) if len(lengths) > 1 else [mean]
        return [tf.reshape(part, d.shape) for part, d in zip(parts, descriptions, strict=True)]

    # ------------------------------------------------------------------ state

    def slots(self, length: int, topology: Topology) -> tuple[Slot, ...]:
        """Describes what lasts from step to step for one bucket, on `topology.rank`.

        Args:
          length: Elements of the bucket.
          topology: The ranks of the job.

        Returns:
          The tensors to keep, in the order in which `state` has them; none by default.
        """
        return ()

    def rescaled(self, state: State, factor: tf.Tensor) -> State:
        """Returns the state after a change of the learning rate or of the loss scale.

        Args:
          state: State of the bucket: a tensor for each of `slots`.
          factor: Factor for everything kept of gradients, a float32 scalar.
        """
        return state

    def flushing(self, state: State) -> State:
        """Returns a state with which all later exchanges send everything, so that nothing is left.

        Args:
          state: State of the bucket: a tensor for each of `slots`.
        """
        return state

    def has_flushed(self, state: State) -> bool:
        """Returns whether an exchange that counted has sent everything since `flushing`.

        Args:
          state: State of the bucket, whose tensors have values.
        """
        return True


class VectorScheme(Scheme):
    """Scheme for gradients as one vector, of one variable or of several.

    Example:
      >>> import dataclasses, tensorflow as tf
      >>> from tfposeidon import schemes
      >>> @dataclasses.dataclass(frozen=True, kw_only=True)
      ... class GatheredMean(schemes.VectorScheme):
      ...     def exchange(self, gradient, state, wire, name):
      ...         gathered = wire.all_gather(gradient[tf.newaxis], wire.topology.world, name)
      ...         return tf.reduce_mean(gathered, 0), state
      ...     def stages(self, length, itemsize, topology):
      ...         parts_bytes = (float(length * itemsize),) * topology.size
      ...         gather = schemes.Transfer(
      ...             name="", operation="all_gather", group=topology.world, parts_bytes=parts_bytes
      ...         )
      ...         added = length * topology.size
      ...         mean = schemes.Work(name="mean", kind="sum", elements=added, operations=added)
      ...         return gather, mean
      >>> scheme, topology = GatheredMean(), schemes.Topology.regular(0, 4, ranks_per_node=1)
      >>> str(scheme), scheme.cost(1000, itemsize=4, topology=topology).cross_bytes
      ('gatheredmean', 12000.0)
    """

    @abstractmethod
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        """Exchanges one bucket.

        Args:
          gradient: Gradient of the bucket, `[n]` floating point, `n` static and the same on every
            rank; not changed.
          state: State of the bucket: a tensor for each of `slots`.
          wire: The collectives to use.
          name: Prefix of the names of collectives: unique per bucket, the same on every rank.

        Returns:
          The mean over all ranks, `[n]` in the gradient's dtype with the same bits on every rank,
          and the new state.
        """

    @abstractmethod
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        """Describes what `topology.rank` does in one exchange.

        Args:
          length: Elements of the bucket.
          itemsize: Bytes of an element.
          topology: The ranks of the job.

        Returns:
          Transfers and local work, one after the other; transfers under the names that `exchange`
          gives them.
        """

    def cost(self, length: int, itemsize: int, topology: Topology) -> Cost:
        """Predicts what `topology.rank` spends on one exchange.

        Args:
          length: Elements of the bucket.
          itemsize: Bytes of an element.
          topology: The ranks of the job.

        Returns:
          Predicted cost of one exchange of the bucket: payload without headers.
        """
        return total_cost(self.stages(length, itemsize, topology), topology)

    @override
    def bucket_stages(
        self, length: int, itemsize: int, factors: Sequence[FactorShape], topology: Topology
    ) -> tuple[Stage, ...]:
        return self.stages(length, itemsize, topology)

    @override
    def exchange_products(
        self, factors: Sequence[FactorPair], rows: tf.Tensor, dtype: str, wire: Wire, name: str
    ) -> tf.Tensor:
        # Products are computed here and no earlier: a step that sends factors does not need them.
        products = [tf.cast(one.own_product, dtype) for one in factors]
        return self.exchange(tf.concat(products, 0), (), wire, name)[0]


class FactorScheme(Scheme):
    """Scheme for one variable whose gradient is a product of two thin matrices, without state.

    Example:
      >>> import dataclasses, tensorflow as tf
      >>> from tfposeidon import schemes
      >>> @dataclasses.dataclass(frozen=True, kw_only=True)
      ... class GatheredFactors(schemes.FactorScheme):
      ...     def exchange_factors(self, factors, wire, name):
      ...         rows = wire.all_gather(factors.packed, wire.topology.world, name)
      ...         return factors.product(rows) / float(wire.topology.size)
      ...     def factor_stages(self, factors, topology):
      ...         parts_bytes = (float(factors.bytes),) * topology.size
      ...         gather = schemes.Transfer(
      ...             name="", operation="all_gather", group=topology.world, parts_bytes=parts_bytes
      ...         )
      ...         return gather, schemes.stages.product(factors, ranks=topology.size)
      >>> factors = schemes.FactorShape(rows=32, left=1000, right=1000, dtype="float32")
      >>> topology = schemes.Topology.regular(0, 4, ranks_per_node=1)
      >>> GatheredFactors().factor_cost(factors, topology).cross_bytes
      768000.0
    """

    needs_factors: ClassVar[bool] = True
    takes_factors: ClassVar[bool] = True

    @abstractmethod
    def exchange_factors(self, factors: FactorPair, wire: Wire, name: str) -> tf.Tensor:
        """Exchanges the factors of one variable.

        Args:
          factors: Factors of this rank, which travel as `FactorPair.packed`; ranks may have
            different numbers of rows.
          wire: The collectives to use.
          name: Prefix of the names of collectives: unique per variable, the same on every rank.

        Returns:
          The mean product over all ranks, `[M * N]` float32 (float64 for float64 factors) with the
          same bits on every rank.
        """

    @abstractmethod
    def factor_stages(self, factors: FactorShape, topology: Topology) -> tuple[Stage, ...]:
        """Describes what `topology.rank` does where every rank has factors of this shape.

        Args:
          factors: Shape of one variable's factors; without rows the bytes of factors count as 0.
          topology: The ranks of the job.

        Returns:
          Transfers and local work, one after the other; transfers under the names that
          `exchange_factors` gives them.
        """

    def factor_cost(self, factors: FactorShape, topology: Topology) -> Cost:
        """Predicts what `topology.rank` spends where every rank has factors of this shape.

        Args:
          factors: Shape of one variable's factors; without rows the bytes of factors count as 0.
          topology: The ranks of the job.

        Returns:
          Predicted cost of one exchange of the variable: payload without headers.
        """
        return total_cost(self.factor_stages(factors, topology), topology)

    @override
    def bucket_stages(
        self, length: int, itemsize: int, factors: Sequence[FactorShape], topology: Topology
    ) -> tuple[Stage, ...]:
        return tuple(
            stage
            for index, one in enumerate(factors)
            for stage in renamed(self.factor_stages(one, topology), str(index))
        )

    @override
    def exchange_products(
        self, factors: Sequence[FactorPair], rows: tf.Tensor, dtype: str, wire: Wire, name: str
    ) -> tf.Tensor:
        # Names by index: Horovod matches collectives by name, and none may occur twice.
        means = [
            self.exchange_factors(one, wire, f"{name}.{index}") for index, one in enumerate(factors)
        ]
        return tf.concat([tf.cast(mean, dtype) for mean in means], 0)
