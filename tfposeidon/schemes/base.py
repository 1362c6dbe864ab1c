"""Base classes of schemes, the central abstraction of this package.

Think of a scheme as a pure function from a gradient and a state to the averaged gradient and a new
state. The residual is the part of earlier gradients that a scheme has not sent yet. It has the
shape of the sum from which the scheme selects elements. In a hierarchical exchange, that sum is a
shard of the node's sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire, Zeros
from tfposeidon.config import Configured
from tfposeidon.gradients import Description, GradientReader, Structure
from tfposeidon.schemes.stages import Cost, Stage, total_cost

State = tuple[tf.Tensor, ...]
"""State of a scheme for one bucket: one tensor per `Slot`, in the same order."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Float32 state tensor of a scheme, initialized with zeros.

    Attributes:
      name: Noun for the values, such as `"residual"`.
      shape: `(n,)` for values of `n` elements of the bucket, `()` for a number that is the same on
        all ranks.
      offset: Index in the bucket of the first of these elements. If the number of ranks changes,
        each element's sum over the ranks that store it is preserved.
    """

    name: str
    shape: tuple[int, ...]
    offset: int = 0


class Scheme(Configured, ABC):
    """Method that averages one bucket of gradients over all ranks.

    Subclasses are frozen, keyword-only dataclasses with `exchange` and `stages`. They have no
    access to variables or learning rates. They store nothing between calls, because the optimizer
    stores their `state`.

    Policies, plans and exchanges read the properties declared here and do not depend on the class,
    so a new scheme overrides the properties whose defaults do not hold. Options must be hashable,
    and Keras must be able to serialize them, because ranks compare them and models are saved with
    them. Import the module of a custom scheme before you load a model that uses it.

    Example:
      >>> import dataclasses, tensorflow as tf
      >>> from tfposeidon import schemes
      >>> @dataclasses.dataclass(frozen=True, kw_only=True)
      ... class GatheredMean(schemes.Scheme):
      ...     def exchange(self, gradient, state, wire, name):
      ...         gathered = wire.all_gather(gradient[tf.newaxis], wire.topology.world, name)
      ...         return tf.reduce_mean(gathered, 0), state
      ...     def stages(self, length, itemsize, topology):
      ...         parts_bytes = (float(length * itemsize),) * topology.size
      ...         gather = schemes.Transfer(
      ...             name="", operation="all_gather", group=topology.world, parts_bytes=parts_bytes
      ...         )
      ...         mean = schemes.Work(name="mean", kind="sum", elements=length * topology.size)
      ...         return gather, mean
      >>> scheme, topology = GatheredMean(), schemes.Topology.regular(0, 4, ranks_per_node=1)
      >>> str(scheme), scheme.cost(1000, itemsize=4, topology=topology).cross_bytes
      ('gatheredmean', 12000.0)
    """

    name: ClassVar[str]
    """Name that plans print; by default the name of the class in lower case."""

    averages: ClassVar[bool] = True
    """False if the result is not a mean. Ranks are then not weighted by their sample counts."""

    loads_evenly: ClassVar[bool] = True
    """True if nodes of equal size send and receive equal numbers of bytes."""

    reader: ClassVar[GradientReader | None] = None
    """Reader of the structure that the scheme exchanges; `None` if it exchanges whole gradients."""

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
        """True if the scheme accumulates velocity. The optimizer's momentum must then be 0."""
        return False

    # ------------------------------------------------------------------ planning

    def refusal(self, description: Description) -> str:
        """Returns the reason why `AllReduce` must replace this scheme for a gradient, or `""`.

        Args:
          description: Description of the gradient.
        """
        return ""

    def fitted(self, structure: Structure, topology: Topology) -> Scheme:
        """Returns the scheme for gradients of one structure: this one, or a replacement.

        Args:
          structure: Structure that the scheme's reader found; its size may not be known yet.
          topology: Topology of the job; the result is the same on every rank.
        """
        return self

    @abstractmethod
    def stages(self, length: int, itemsize: int, topology: Topology) -> tuple[Stage, ...]:
        """Describes the stages of `topology.rank` in one exchange.

        Args:
          length: Number of elements of the bucket.
          itemsize: Size of an element in bytes.
          topology: Topology of the job.

        Returns:
          Transfers and local work, in order; each transfer has the name of its collective in
          `exchange`.
        """

    def bucket_stages(
        self, length: int, itemsize: int, structures: Sequence[Structure], topology: Topology
    ) -> tuple[Stage, ...]:
        """Describes the stages of `topology.rank` in one exchange of a bucket.

        Args:
          length: Number of elements of all variables of the bucket.
          itemsize: Size of an element in bytes.
          structures: Structure of each gradient; empty for schemes without a reader.
          topology: Topology of the job.

        Returns:
          Transfers and local work, in order.
        """
        return self.stages(length, itemsize, topology)

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

    def note(self, length: int, topology: Topology) -> str:
        """Returns a remark on an unexpected exchange, such as a dense one by `HiTopK`, or `""`.

        Args:
          length: Number of elements of the bucket.
          topology: Topology of the job.
        """
        return ""

    # ------------------------------------------------------------------ exchange

    @abstractmethod
    def exchange(
        self, gradient: tf.Tensor, state: State, wire: Wire, name: str
    ) -> tuple[tf.Tensor, State]:
        """Exchanges one bucket as a vector.

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

    def exchange_structures(
        self,
        gradients: Sequence[Any],
        descriptions: Sequence[Description],
        weight: tf.Tensor | None,
        wire: Wire,
        name: str,
        zeros: Zeros,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Exchanges the gradients of a bucket in the form that the scheme's reader returned.

        Args:
          gradients: Gradient of each variable, from the reader; `None` for zeros.
          descriptions: Description of each gradient.
          weight: Weight of this rank, a float32 scalar; `None` for 1.
          wire: Collectives of the job.
          name: Prefix of the names of collectives: unique per bucket, the same on every rank.
          zeros: Scalar variables with value 0, for tensors that TensorFlow must not fold.

        Returns:
          Mean over all ranks, `[n]`, and the sum of the structures' sizes over all ranks and
          variables, a float32 scalar.
        """
        raise NotImplementedError

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
        """Returns whether a step that was not skipped has sent all residuals since `flushing`.

        Args:
          state: State of the bucket, as eager tensors.
        """
        return True


class ResidualScheme(Scheme, ABC):
    """Scheme that sends a part of the gradient and retains the rest as residual for later steps.

    The first of its slots has shape `()`. Its value is 0 or more while the scheme sends parts, and
    `FLUSHING` if the next exchange must send everything. That exchange returns `FLUSHED`. All other
    slots are in the gradient's unit.

    `benchmarks/baselines/one_bit.py` is an example.

    Attributes:
      min_elements: Number of elements below which a variable is sent densely. Each subclass has
        this option.
    """

    # Two values are necessary, because a skipped step discards the new state and must be repeated.
    FLUSHING: ClassVar[float] = -1.0
    """First number of the state if the next exchange must send everything."""
    FLUSHED: ClassVar[float] = -2.0
    """First number of the state after an exchange that sent everything."""

    min_elements: int

    @property
    @override
    def exact(self) -> bool:
        return False

    @property
    @override
    def min_length(self) -> int:
        return self.min_elements

    @override
    def rescaled(self, state: State, factor: tf.Tensor) -> State:
        # A residual stored at learning rate a and sent at rate b would otherwise count b / a times.
        progress, *kept = state
        return (progress, *(tensor * factor for tensor in kept))

    @override
    def flushing(self, state: State) -> State:
        progress, *kept = state
        return (tf.fill(tf.shape(progress), self.FLUSHING), *kept)

    @override
    def has_flushed(self, state: State) -> bool:
        return float(state[0]) == self.FLUSHED
