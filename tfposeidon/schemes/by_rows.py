"""Two schemes for one variable: each step takes the one that suits the rows it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import tensorflow as tf

from tfposeidon.communication.wire import Wire
from tfposeidon.gradients.factors import Factors
from tfposeidon.schemes.base import FactorScheme, Scheme, VectorScheme


@dataclass(frozen=True, kw_only=True)
class ByRows(Scheme):
    """Takes one scheme up to a number of rows, and another beyond it.

    How many rows there are is known when a step runs, whoever feeds it: they are added up over ranks, so that all take
    the same branch. The plan shows the scheme that the last step took. Variables whose factors have the same shape may
    share a bucket.

    Args:
      few: Sends the factors of each variable.
      many: Sends the factors of each variable, too, or the products of all of them as one vector.
      limit: Rows up to which `few` is taken, of one variable and all ranks together.

    Cost: that of the scheme that is taken.
    """

    name: ClassVar[str] = "by rows"
    few: FactorScheme
    many: FactorScheme | VectorScheme
    limit: int

    def __str__(self) -> str:
        return f"{self.few} or {self.many}"

    def taken(self, rows: float) -> FactorScheme | VectorScheme:
        """What a step takes with that many rows of one variable, of all ranks together."""
        return self.few if rows <= self.limit else self.many

    def exchange_factors(
        self, factors: Sequence[Factors], rows: tf.Tensor, dtype: str, wire: Wire, name: str
    ) -> tf.Tensor:
        """As `mean_products`, by the scheme that suits `rows`: of all variables and ranks together, a scalar."""
        return tf.cond(
            rows <= self.limit * len(factors),
            lambda: mean_products(self.few, factors, dtype, wire, name),
            lambda: mean_products(self.many, factors, dtype, wire, name),
        )

    def get_config(self) -> dict[str, Any]:
        schemes = {
            part: keras.saving.serialize_keras_object(getattr(self, part))
            for part in ("few", "many")
        }
        return {**schemes, "limit": self.limit}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ByRows:
        schemes = {
            part: keras.saving.deserialize_keras_object(config[part]) for part in ("few", "many")
        }
        return cls(**{**config, **schemes})


def mean_products(
    scheme: FactorScheme | VectorScheme,
    factors: Sequence[Factors],
    dtype: str,
    wire: Wire,
    name: str,
) -> tf.Tensor:
    """Exchanges the factors of some variables, or their products, which are only then computed.

    Args:
      scheme: How.
      factors: Of this rank, one for each variable.
      dtype: Of the variables' gradients on the wire.
      wire: The collectives to use.
      name: Prefix for their names.

    Returns:
      The mean products over all ranks one after the other, `[n]` in `dtype`.
    """
    if isinstance(scheme, VectorScheme):
        products = [tf.cast(one.own_product, dtype) for one in factors]
        return scheme.exchange(tf.concat(products, 0), (), wire, name)[0]
    means = [
        scheme.exchange_factors(one, wire, f"{name}.{place}") for place, one in enumerate(factors)
    ]
    return tf.concat([tf.cast(mean, dtype) for mean in means], 0)
