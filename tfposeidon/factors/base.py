"""Provides base classes of schemes that exchange sufficient factors.

Ranks first sum their numbers of batch rows, because this sum determines whether some schemes send
factors or their products. Ranks then exchange the factors or products.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire, Zeros, opaque
from tfposeidon.factors.pairs import FactorPair, FactorShape
from tfposeidon.factors.reader import FactorReader
from tfposeidon.gradients import Description, Structure, as_vector
from tfposeidon.schemes.base import Scheme, State
from tfposeidon.schemes.stages import Cost, Stage, renamed, total_cost


class SchemeOfFactors(Scheme):
    """Stateless scheme that receives factors, and sends the factors or their products."""

    reader: ClassVar[FactorReader] = FactorReader()

    @override
    def refusal(self, description: Description) -> str:
        # Before the first step, factors are unknown, so only the shape can be checked.
        if len(description.shape) < 2:
            return f"not a matrix, as {self.name} requires"
        why = description.why_no_structure
        return f"no factors for {self.name}: {why}" if why else ""

    @abstractmethod
    def exchange_pairs(
        self, factors: Sequence[FactorPair], rows: tf.Tensor, dtype: str, wire: Wire, name: str
    ) -> tf.Tensor:
        """Averages a bucket's products over all ranks; `rows` are its batch rows on all ranks."""

    @override
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        dtype = {2: "float16", 4: "float32", 8: "float64"}[itemsize]
        return self.bucket_stages(length, itemsize, [FactorShape(1, 1, length, dtype)], topology)

    @override
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        # A vector is the product of a 1 x 1 matrix and a single row.
        factors = FactorPair(tf.ones([1, 1], gradient.dtype), gradient[tf.newaxis])
        one, dtype = tf.ones([]), gradient.dtype.name
        return self.exchange_pairs([factors], one, dtype, wire, name), state

    @override
    def exchange_structures(
        self,
        gradients: Sequence[Any],
        descriptions: Sequence[Description],
        weight: tf.Tensor | None,
        wire: Wire,
        name: str,
        zeros: Zeros,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        value = zeros["float32"].read_value()[tf.newaxis]
        factors = [
            # Contribute no rows without a gradient.
            self.reader.artificial(d.sized(None), value) if g is None else g
            for g, d in zip(gradients, descriptions, strict=True)
        ]
        rows = _summed_rows(factors, weight, wire, name, zeros)
        sent = [_sent(one, weight, zeros) for one in factors]
        mean = self.exchange_pairs(sent, rows, descriptions[0].dtype, wire, name)
        mean = tf.ensure_shape(mean, [sum(d.length for d in descriptions)])
        # The local term is equal on all ranks, so each rank adds it after averaging.
        if any(one.local is not None for one in factors):
            mean += as_vector([one.local for one in factors], descriptions, zeros)
        return mean, rows


class FactorScheme(SchemeOfFactors):
    """Stateless scheme for variables whose gradients are products of two thin matrices.

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
      ...         return gather, factors.multiplication(ranks=topology.size)
      >>> factors = schemes.FactorShape(rows=32, left=1000, right=1000, dtype="float32")
      >>> topology = schemes.Topology.regular(0, 4, ranks_per_node=1)
      >>> GatheredFactors().factor_cost(factors, topology).cross_bytes
      768000.0
    """

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
          factors: Shape of one variable's factors; if `rows` is `None`, factors have 0 bytes.
          topology: Topology of the job.

        Returns:
          Transfers and local work in the order of execution. Each transfer has the name of its
          collective in `exchange_factors`.
        """

    def factor_cost(self, factors: FactorShape, topology: Topology) -> Cost:
        """Predicts the cost for `topology.rank` if every rank has factors of this shape.

        Args:
          factors: Shape of one variable's factors; if `rows` is `None`, factors have 0 bytes.
          topology: Topology of the job.

        Returns:
          Predicted cost of one exchange of the variable; bytes are payload without headers.
        """
        return total_cost(self.factor_stages(factors, topology), topology)

    @override
    def bucket_stages(
        self, length: int, itemsize: int, structures: Sequence[Structure], topology: Topology
    ) -> tuple[Stage, ...]:
        return tuple(
            stage
            for index, shape in enumerate(structures)
            for stage in renamed(self.factor_stages(cast(FactorShape, shape), topology), str(index))
        )

    @override
    def exchange_pairs(
        self, factors: Sequence[FactorPair], rows: tf.Tensor, dtype: str, wire: Wire, name: str
    ) -> tf.Tensor:
        # Add the index to names, because Horovod matches collectives by name.
        means = [self.exchange_factors(f, wire, f"{name}.{i}") for i, f in enumerate(factors)]
        return tf.concat([tf.cast(mean, dtype) for mean in means], 0)


def _summed_rows(
    factors: Sequence[FactorPair], weight: tf.Tensor | None, wire: Wire, name: str, zero: Zeros
) -> tf.Tensor:
    # Wait for activations and the weight even if shapes are static, because a rank that has just
    # exhausted its iterator must not join the sum. The forward pass computes the activations, so
    # the sum is usually ready before the first gradient. Sum on the CPU, because branching on a GPU
    # tensor would wait for the GPU.
    after = [*(one.left for one in factors), *([] if weight is None else [weight])]
    with tf.device("/CPU:0"), tf.control_dependencies(after):
        mine = tf.cast(tf.add_n([tf.shape(one.left)[0] for one in factors]), tf.float32)
        # Add a variable, because static shapes are constants, which collectives must not receive.
        mine += zero["float32"].read_value()
        return wire.all_reduce(mine[tf.newaxis], wire.topology.world, f"{name}.rows")[0]


def _sent(factors: FactorPair, weight: tf.Tensor | None, zero: Zeros) -> FactorPair:
    if weight is not None:
        factors = factors.weighted(weight)
    left, right = (opaque(matrix, zero["int32"]) for matrix in factors.tensors)
    return dataclasses.replace(factors, left=left, right=right)
