"""Base classes of schemes, the central abstraction of this package.

Think of a scheme as a pure function from a gradient and a state to the mean gradient and a new
state. A `VectorScheme` exchanges gradients as vectors, a `FactorScheme` as products of two thin
matrices.
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
"""State of a scheme for one bucket: one tensor per `Slot`, in the same order."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One float32 state tensor of a scheme; it starts at zero.

    Attributes:
      name: Noun for the values, such as `"residual"`.
      shape: `(n,)` for values of `n` elements of the bucket, `()` for a number that is the same on
        all ranks.
      offset: Index in the bucket of the first of these elements. If the number of ranks changes,
        the sum over all ranks that hold an element is preserved.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = 0


class Scheme(Configured, ABC):
    """Method that averages one bucket of gradients over all ranks.

    Subclasses are frozen, keyword-only dataclasses. They have no access to variables or learning
    rates, and store nothing between calls: whatever must persist is `state`, which the optimizer
    stores.

    Policies, plans and exchanges read the properties declared here and do not test for classes, so
    a new scheme overrides the properties in which it differs. Options must be hashable: ranks
    compare them, and models are saved with them. Loading a saved scheme requires that Python has
    imported its module.

    Example:
      >>> from tfposeidon import schemes
      >>> scheme = schemes.AllToAll(wire_dtype="float16")
      >>> isinstance(scheme, schemes.Scheme), str(scheme), scheme.exact
      (True, 'alltoall(wire_dtype=float16)', False)
    """

    name: ClassVar[str]
    """Name that plans print; by default the name of the class in lower case."""

    needs_factors: ClassVar[bool] = False
    """True if the scheme only exchanges gradients that are products of two thin matrices."""

    takes_factors: ClassVar[bool] = False
    """True if the scheme receives the factors of gradients, even if it then sends products."""

    averages: ClassVar[bool] = True
    """False if the result is not a mean, so that it is not weighted by samples."""

    loads_evenly: ClassVar[bool] = True
    """True if nodes of equal size send and receive equal numbers of bytes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = vars(cls).get("name", cls.__name__.lower())

    def __str__(self) -> str:
        """Returns the name, with the options that differ from their defaults."""
        shown = [f for f in fields(self) if f.repr]  # type: ignore[arg-type]
        options = [
            f"{f.name}={getattr(self, f.name)}" for f in shown if getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(options)})" if options else self.name

    @property
    def exact(self) -> bool:
        """True if the result is the mean up to rounding in the gradient's own dtype."""
        return True

    @property
    def min_length(self) -> int:
        """Number of elements below which another scheme sends a variable."""
        return 0

    @property
    def for_small_variables(self) -> Scheme | None:
        """Scheme for variables with fewer than `min_length` elements; `None` means `AllReduce`."""
        return None

    @property
    def corrects_momentum(self) -> bool:
        """True if the scheme accumulates velocity, so that the optimizer must not."""
        return False

    # ------------------------------------------------------------------ planning

    def fitted(self, factors: FactorShape, topology: Topology) -> Scheme:
        """Returns the scheme for one variable: this one, or a replacement.

        Args:
          factors: Shape of the variable's factors, with the batch rows of a step if they are known.
          topology: Topology of the job; the result is the same on every rank.
        """
        return self

    def for_rows(self, rows: float) -> Scheme:
        """Returns the scheme that a step with this number of batch rows uses.

        Args:
          rows: Batch rows of one variable's factors, summed over all ranks.
        """
        return self

    @abstractmethod
    def bucket_stages(
        self, length: int, itemsize: int, factors: Sequence[FactorShape], topology: Topology
    ) -> tuple[Stage, ...]:
        """Describes the stages of `topology.rank` in the exchange of one bucket.

        Args:
          length: Number of elements of all variables of the bucket.
          itemsize: Size of an element in bytes.
          factors: Shape of each variable's factors; ignored by schemes that exchange vectors.
          topology: Topology of the job.

        Returns:
          Transfers and local work, in their order.
        """

    def bucket_cost(
        self, length: int, itemsize: int, factors: Sequence[FactorShape], topology: Topology
    ) -> Cost:
        """Predicts the cost of one bucket for `topology.rank`.

        Args:
          length: Number of elements of all variables of the bucket.
          itemsize: Size of an element in bytes.
          factors: Shape of each variable's factors; ignored by schemes that exchange vectors.
          topology: Topology of the job.

        Returns:
          Predicted cost of one exchange of the bucket; bytes are payload without headers.
        """
        return total_cost(self.bucket_stages(length, itemsize, factors, topology), topology)

    def note(self, length: int, topology: Topology) -> str:
        """Returns a remark if the exchange differs from what the scheme's name implies, else `""`.

        Args:
          length: Number of elements of the bucket.
          topology: Topology of the job.
        """
        return ""

    # ------------------------------------------------------------------ exchange

    @abstractmethod
    def exchange_products(
        self, factors: Sequence[FactorPair], rows: tf.Tensor, dtype: str, wire: Wire, name: str
    ) -> tf.Tensor:
        """Exchanges a bucket of gradients that are given as factors.

        Args:
          factors: Factors of this rank, one pair per variable.
          rows: Batch rows summed over all variables and ranks, a float32 scalar.
          dtype: Dtype of the result.
          wire: Collectives of the job.
          name: Prefix of the names of collectives: unique per bucket, the same on every rank.

        Returns:
          Mean products over all ranks, concatenated, `[n]` in `dtype` with the same bits on every
          rank.
        """

    def unpack(
        self, mean: tf.Tensor, descriptions: Sequence[Description], topology: Topology
    ) -> list[tf.Tensor]:
        """Splits the result of a bucket into its variables.

        Args:
          mean: Result of the exchange, `[n]`.
          descriptions: Descriptions of the bucket's gradients.
          topology: Topology of the job.

        Returns:
          One tensor per variable, by default in the variable's shape.
        """
        lengths = [d.length for d in descriptions]
        parts = tf.split(mean, lengths) if len(lengths) > 1 else [mean]
        return [tf.reshape(part, d.shape) for part, d in zip(parts, descriptions, strict=True)]

    # ------------------------------------------------------------------ state

    def slots(self, length: int, topology: Topology) -> tuple[Slot, ...]:
        """Describes the state of one bucket on `topology.rank`.

        Args:
          length: Number of elements of the bucket.
          topology: Topology of the job.

        Returns:
          Descriptions of the state tensors, in the order of `state`; none by default.
        """
        return ()

    def rescaled(self, state: State, factor: tf.Tensor) -> State:
        """Returns the state after a change of the learning rate or of the loss scale.

        Args:
          state: State of the bucket: one tensor per slot.
          factor: Factor for all state in the unit of gradients, a float32 scalar.
        """
        return state

    def flushing(self, state: State) -> State:
        """Returns a state with which later exchanges send everything, so that no residual remains.

        Args:
          state: State of the bucket: one tensor per slot.
        """
        return state

    def has_flushed(self, state: State) -> bool:
        """Returns whether a step that was not skipped has sent everything since `flushing`.

        Args:
          state: State of the bucket, as eager tensors.
        """
        return True


class VectorScheme(Scheme):
    """Scheme that exchanges the gradients of one or several variables as one vector.

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
          gradient: Gradient of the bucket, `[n]` floating point, where `n` is static and the same
            on every rank; not changed.
          state: State of the bucket: one tensor per slot.
          wire: Collectives of the job.
          name: Prefix of the names of collectives: unique per bucket, the same on every rank.

        Returns:
          Mean over all ranks, `[n]` in the gradient's dtype with the same bits on every rank, and
          the new state.
        """

    @abstractmethod
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        """Describes the stages of `topology.rank` in one exchange.

        Args:
          length: Number of elements of the bucket.
          itemsize: Size of an element in bytes.
          topology: Topology of the job.

        Returns:
          Transfers and local work, in their order; transfers have the names that `exchange` gives
          them.
        """

    def cost(self, length: int, itemsize: int, topology: Topology) -> Cost:
        """Predicts the cost of one exchange for `topology.rank`.

        Args:
          length: Number of elements of the bucket.
          itemsize: Size of an element in bytes.
          topology: Topology of the job.

        Returns:
          Predicted cost of one exchange of the bucket; bytes are payload without headers.
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
        # Products are computed only here, because a step that sends factors does not need them.
        products = [tf.cast(one.own_product, dtype) for one in factors]
        return self.exchange(tf.concat(products, 0), (), wire, name)[0]


class FactorScheme(Scheme):
    """Stateless scheme for one variable whose gradient is a product of two thin matrices.

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
          factors: Factors of this rank, sent as `FactorPair.packed`; ranks may have different
            numbers of batch rows.
          wire: Collectives of the job.
          name: Prefix of the names of collectives: unique per variable, the same on every rank.

        Returns:
          Mean product over all ranks, `[M * N]` float32 (float64 for float64 factors) with the same
          bits on every rank.
        """

    @abstractmethod
    def factor_stages(self, factors: FactorShape, topology: Topology) -> tuple[Stage, ...]:
        """Describes the stages of `topology.rank` if every rank has factors of this shape.

        Args:
          factors: Shape of one variable's factors; without batch rows, the bytes of factors count
            as 0.
          topology: Topology of the job.

        Returns:
          Transfers and local work, in their order; transfers have the names that `exchange_factors`
          gives them.
        """

    def factor_cost(self, factors: FactorShape, topology: Topology) -> Cost:
        """Predicts the cost for `topology.rank` if every rank has factors of this shape.

        Args:
          factors: Shape of one variable's factors; without batch rows, the bytes of factors count
            as 0.
          topology: Topology of the job.

        Returns:
          Predicted cost of one exchange of the variable; bytes are payload without headers.
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
        # Names contain the index, because Horovod matches collectives by name, which must be
        # unique.
        means = [
            self.exchange_factors(one, wire, f"{name}.{index}") for index, one in enumerate(factors)
        ]
        return tf.concat([tf.cast(mean, dtype) for mean in means], 0)
