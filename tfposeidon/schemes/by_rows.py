"""Two schemes for one variable: each step takes the one that suits the rows it has."""

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
    """Takes one scheme up to a number of rows, and another beyond it.

    How many rows there are is known when a step runs, whoever feeds it: they are added up over
    ranks, so that all take the same branch. The plan shows the scheme that the last step took.
    Variables whose factors have the same shape may share a bucket.

    Args:
      few: Scheme that sends the factors of each variable.
      many: Scheme that sends the factors of each variable, too, or the products of all of them as
        one vector.
      limit: Rows up to which `few` is taken, of one variable and all ranks together.

    Cost: that of the scheme that is taken.

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
        # Before the first step nobody knows how many rows there are; `for_rows` tells afterwards.
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
