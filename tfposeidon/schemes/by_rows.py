"""Two schemes for one variable, of which each step uses one, chosen by its batch rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire
from tfposeidon.gradients.factors import FactorPair, FactorShape
from tfposeidon.schemes.base import FactorScheme, Scheme, VectorScheme
from tfposeidon.schemes.cost import Stage


@dataclass(frozen=True, kw_only=True)
class ByRows(Scheme):
    """Uses one scheme up to a number of batch rows, and another above it.

    The number of rows is only known when a step runs. It is summed over ranks, so that all ranks
    take the same branch. The plan shows the scheme that the last step used. Variables whose factors
    have the same shape may share a bucket.

    Args:
      few: Scheme that sends the factors of each variable.
      many: Scheme that sends the factors of each variable as well, or the products of all variables
        as one vector.
      limit: Batch rows of one variable, summed over all ranks, up to which `few` is used.

    Cost: that of the scheme that is used.

    Example:
      >>> from tfposeidon import schemes
      >>> scheme = schemes.ByRows(
      ...     few=schemes.Factors(), many=schemes.ParameterServer(), limit=64
      ... )
      >>> [str(scheme.for_rows(rows)) for rows in (64, 65)]
      ['factors', 'ps']
    """

    name: ClassVar[str] = "by rows"
    takes_factors: ClassVar[bool] = True
    few: FactorScheme
    many: FactorScheme | VectorScheme
    limit: int

    def __str__(self) -> str:
        return f"{self.few} or {self.many}"

    @override
    def for_rows(self, rows: float) -> Scheme:
        return self.few if rows <= self.limit else self.many

    @override
    def bucket_stages(
        self, length: int, itemsize: int, factors: Sequence[FactorShape], topology: Topology
    ) -> tuple[Stage, ...]:
        # Before the first step the number of rows is unknown; after it, callers use `for_rows`.
        return self.many.bucket_stages(length, itemsize, factors, topology)

    @override
    def exchange_products(
        self, factors: Sequence[FactorPair], rows: tf.Tensor, dtype: str, wire: Wire, name: str
    ) -> tf.Tensor:
        # `rows` is an all-reduced sum, so every rank takes the same branch.
        return tf.cond(
            rows <= self.limit * len(factors),
            lambda: self.few.exchange_products(factors, rows, dtype, wire, name),
            lambda: self.many.exchange_products(factors, rows, dtype, wire, name),
        )
