"""Executes a plan: one exchange per bucket, which starts once the bucket's gradients exist.

Exchanges of different buckets do not depend on each other. TensorFlow therefore starts them in the
order in which backpropagation computes the gradients (wait-free backpropagation, Poseidon section
3.1).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfposeidon.checks import at_first_entry, at_first_item, require_equal
from tfposeidon.communication.wire import Wire, Zeros, exchange_objects, names_ending_in
from tfposeidon.exchange.means import Expectation, Presence, Share, weight_of
from tfposeidon.exchange.observer import Observer
from tfposeidon.exchange.parallel_operator import NormMethod
from tfposeidon.exchange.plan import Plan
from tfposeidon.exchange.replicas import SAME_MODEL, check_same_variables, variables_as_json
from tfposeidon.exchange.scheme_states import SchemeStates
from tfposeidon.gradients import as_vector, tensors_of
from tfposeidon.schemes.base import Scheme, State

Afterwards = Callable[[list[Any]], list[Any]]
"""Maps averaged gradients to the results of collectives that follow each exchange."""

Exchanged = tuple[list[Any], list[State]]
"""Averaged gradients, one per variable, and the new state of each exchanged bucket's scheme."""


class Exchanger:
    """Exchanges the gradients of one list of variables.

    Names of collectives begin with `prefix`, which is `None` until ranks have agreed on the plan.
    `sizes[i]` is the size of bucket i's gradient structures, such as batch rows, summed over ranks
    and variables, in the last step in which it was not 0. `all_were_present` is true if every rank
    had all gradients in the first traced step. `is_first_call` is true during the first exchange of
    a step. `calls` is the maximum number of exchanges in a traced step.
    """

    def __init__(self, plan: Plan, wire: Wire, zeros: Zeros | None = None) -> None:
        self.plan, self.wire = plan, wire
        self.prefix: str | None = None
        self.observer: Observer | None = None
        self.norm_method = NormMethod()
        self.notes: tuple[str, ...] = ()
        self.xla_functions = 0
        self._present_at_first_step: list[bool] = []
        self.all_were_present = self.is_first_call = False
        self.calls = 0
        # Count calls by graph, because each trace starts at 0. Weak keys keep no graph alive.
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Create the zeros for counts and for `opaque` before a step is traced; see `Zeros`.
        self._zeros = Zeros() if zeros is None else zeros
        for dtype in sorted({"float32", "int32", *(bucket.dtype for bucket in plan.buckets)}):
            self._zeros[dtype]
        # Allocate one element per variable, because the number of buckets is known only in a trace.
        # If a trace created variables, TensorFlow would trace the step again.
        self.sizes = _variable([len(plan.descriptions)], "sizes")
        # Total number of samples in the last step if all ranks had equally many, else 0.
        self._expected = _variable([], "samples")
        self.states = SchemeStates(plan)

    @property
    def is_used(self) -> bool:
        """True if ranks have agreed on the plan, or the state of schemes is from an earlier run."""
        return bool(self.prefix or tf.reduce_any(self.states.had_gradient > 0.0))

    def agree(self, prefix: str, gradients: Sequence[Any], settings: dict[str, Any]) -> None:
        """Checks before the first exchange that variables and settings are equal on all ranks."""
        schemes = {m: repr(bucket.scheme) for bucket in self.plan.buckets for m in bucket.members}
        mine = {
            "settings": settings,
            "variables": variables_as_json(self.plan.descriptions),
            "present": [g is not None for g in gradients],
            "schemes": [schemes[member] for member in sorted(schemes)],
        }
        # Compare once now, outside of the traced graph, and not in every step.
        with tf.init_scope():
            everybody = exchange_objects(mine, self.wire, f"{prefix}.agree")
        require_equal(
            [other["settings"] for other in everybody],
            "All ranks must use the same exchange settings",
            SAME_MODEL,
            at_first_entry(),
        )
        check_same_variables([other["variables"] for other in everybody])
        require_equal(
            [other["schemes"] for other in everybody],
            "All ranks must choose the same scheme for a variable",
            "Name the layers that rules match: names that Keras generates, such as 'dense_1', "
            "depend on earlier layers of the process.",
            at_first_item("variable"),
        )
        flags = list(zip(*(other["present"] for other in everybody), strict=True))
        self._present_at_first_step = [any(of_ranks) for of_ranks in flags]
        self.all_were_present = all(map(all, flags))
        self.prefix = prefix

    def missing(self, gradients: Sequence[Any]) -> tuple[list[int], ...]:
        """Groups variables without a gradient by whether any rank had one in the first step."""
        own = [index for index, gradient in enumerate(gradients) if gradient is None]
        were_present = self._present_at_first_step
        groups = [i for i in own if were_present[i]], [i for i in own if not were_present[i]]
        return tuple(filter(None, groups))

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Numbers a call of the optimizer: the names of collectives in a graph must be unique."""
        graph = tf.compat.v1.get_default_graph()
        # Names of eager collectives need not be unique.
        number = 0 if tf.executing_eagerly() else self._calls.get(graph, 0)
        self._calls[graph] = number + 1
        self.is_first_call = number == 0
        self.calls = max(self.calls, number + 1)
        with names_ending_in(_number(number)):
            yield

    def presence(
        self, gradients: Sequence[Any], count: Any, has_batch: bool = True, with_means: bool = False
    ) -> Presence:
        """Counts participating ranks and gradients with one small all-reduce.

        Returns the sum of `count` over ranks, the number of ranks without a batch, and for each
        variable the number of ranks that have its gradient. With `with_means`, `count` must be 0 or
        1, because the all-reduce computes means, which are scaled back and rounded.
        """
        name, world = f"{self.prefix}.samples", self.wire.topology.world
        ranks = float(world.size)
        # Run on the CPU, because branching on a GPU tensor would wait for the GPU.
        with tf.device("/CPU:0"):
            # Add a variable with value 0: a static batch size is a constant, and would be folded.
            unknown = self._zeros["float32"].read_value()
            has_gradient = [float(has_batch and gradient is not None) for gradient in gradients]
            flags = tf.constant([float(has_batch), *has_gradient]) + unknown
            mine = tf.concat([(tf.cast(count, tf.float32) + unknown)[tf.newaxis], flags], 0)
            # Use the scale of `AllReduce`, because Horovod only fuses all-reduces of equal scale.
            scale = 1.0 / ranks if with_means else 1.0
            found = self.wire.all_reduce(mine, world, name, scale=scale)
            found = tf.round(ranks * found) if with_means else found
            if self.plan.reader is not None:
                self.plan.reader.check_presence(self.plan.structured, found[2:], found[1])
            return Presence(found[0], ranks - found[1], found[2:])

    def equal_share(self, gradients: Sequence[Any]) -> Share:
        """Returns this rank's `Share` without counting, if all ranks have equally many samples."""
        for gradient, path in zip(gradients, self.plan.paths, strict=True):
            if gradient is None:
                raise ValueError(
                    "A variable with a gradient on all ranks in the first step must have one in "
                    f"every traced step. Received: None for {path!r}. Pass zeros, or compile the "
                    "model with a new optimizer."
                )
        ranks = float(self.wire.topology.size)
        with_gradient = tf.fill([len(gradients)], ranks)
        return Share(Presence(tf.constant(ranks), tf.constant(0.0), with_gradient))

    def share(self, gradients: Sequence[Any], count: Any, has_batch: bool = True) -> Share:
        """Returns this rank's weight, and the participation of all ranks.

        `count` is this rank's number of samples; `None` weights all ranks equally.
        """
        size = self.wire.topology.size
        if self.plan.structured or size == 1:
            # Structures may need exact weights before they are sent; one rank waits for no other.
            # Readers expect gradients of all ranks with a batch.
            has_batch = has_batch and (size == 1 or any(one is not None for one in gradients))
            presence = self.presence(gradients, 1.0 if count is None else count, has_batch)
            if count is None or not has_batch:
                return Share(presence)
            return Share(presence, weight_of(tf.cast(count, tf.float32), presence.total, size))
        ranks = float(size)
        with tf.device("/CPU:0"):
            zero = self._zeros["float32"].read_value()
            count = tf.cast(1.0 if count is None else count, tf.float32) + zero
            before = self._expected.read_value()
            is_known = before > 0.0
            total, are_equal = tf.cond(
                is_known, lambda: (before, tf.constant(True)), lambda: self._count_all(count)
            )
            weight = tf.where(is_known, 1.0, weight_of(count, total, size))
            # A batch without samples is never as expected: its mean is NaN and must not be sent.
            is_as_expected = (count * ranks == total) & (count > 0.0)
        # Wait for the first gradient. Horovod then usually runs this all-reduce in one cycle with
        # the first bucket, and a rank whose input is exhausted does not start it.
        first = [tensor for gradient in gradients for tensor in tensors_of(gradient)][-1:]
        with tf.control_dependencies(first):
            presence = self.presence(gradients, is_as_expected, has_batch, with_means=True)
        with tf.device("/CPU:0"):
            were_all = presence.absent == 0.0
            were_wrong = is_known & were_all & (presence.total < ranks)
        return Share(presence, weight, Expectation(count, total, are_equal, were_all, were_wrong))

    def _count_all(self, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the total count of all ranks, and whether all have the same positive count."""
        with tf.device("/CPU:0"):
            world, name = self.wire.topology.world, f"{self.prefix}.all_samples"
            counts = self.wire.all_gather(count[tf.newaxis], world, name)
            are_equal = tf.reduce_all(counts == counts[0]) & (counts[0] > 0.0)
            # Return a product: steps compare products with it, and a sum may round differently.
            return tf.where(are_equal, count * world.size, tf.reduce_sum(counts)), are_equal

    def join_call(
        self, count: Any, finite: Any, has_batch: bool = True
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Exchanges the counts of a call that accumulates gradients, with one small all-reduce.

        Returns this rank's weight, whether gradients are finite on all ranks with samples, and the
        number of ranks with exhausted input.
        """
        topology, name = self.wire.topology, f"{self.prefix}.calls"
        with tf.device("/CPU:0"):
            count = tf.cast(count, tf.float32)
            # Ignore gradients of empty batches: their mean is NaN.
            own = [count, tf.logical_and(count > 0.0, tf.logical_not(finite)), has_batch]
            zero = self._zeros["float32"].read_value()
            mine = tf.stack([tf.cast(one, tf.float32) for one in own]) + zero
            total = self.wire.all_reduce(mine, topology.world, name)
            weight = weight_of(mine[0], total[0], topology.size)
            return weight, total[1] == 0.0, topology.size - total[2]

    def exchange(
        self,
        gradients: Sequence[Any],
        weight: tf.Tensor | None,
        expectation: Expectation | None = None,
        rescale: tf.Tensor | None = None,
        buckets: Collection[int] | None = None,
    ) -> Exchanged:
        """Exchanges the gradients of the buckets with the indices `buckets`, by default all."""
        packed: dict[int, tf.Tensor] = {}
        found: dict[int, tuple[tf.Tensor, State]] = {}
        sizes: dict[int, tf.Tensor] = {}
        for index, bucket in enumerate(self.plan.buckets):
            if buckets is not None and index not in buckets:
                continue
            scheme, descriptions = bucket.scheme, bucket.descriptions
            members = [gradients[member] for member in bucket.members]
            name, state = self._name(index), self.states.read(index, rescale)
            if scheme.reader is None:
                packed[index] = vector = as_vector(members, descriptions, self._zeros)
                sent = _weighted(vector, weight, scheme)
                found[index] = scheme.exchange(sent, state, self.wire, name)
            else:
                mean, sizes[index] = scheme.exchange_structures(
                    members, descriptions, weight, self.wire, name, self._zeros
                )
                found[index] = mean, state
        if expectation is not None:
            found = self._corrected(found, packed, expectation, rescale)
        self._keep_sizes(sizes)
        # A mean is zeros if no rank has the gradient, and `None` if its bucket is not exchanged.
        means: list[Any] = [None] * len(gradients)
        for index, (mean, _) in found.items():
            bucket = self.plan.buckets[index]
            parts = bucket.scheme.unpack(mean, bucket.descriptions, self.wire.topology)
            for member, part in zip(bucket.members, parts, strict=True):
                means[member] = part
        return means, [state for _, state in found.values()]

    def _corrected(
        self,
        found: dict[int, tuple[tf.Tensor, State]],
        packed: dict[int, tf.Tensor],
        expected: Expectation,
        rescale: tf.Tensor | None,
    ) -> dict[int, tuple[tf.Tensor, State]]:
        """Repeats the exchange with exact weights if a rank's number of samples was unexpected."""

        def exchange(weight: tf.Tensor) -> dict[int, tuple[tf.Tensor, State]]:
            again = {}
            for index, vector in packed.items():
                scheme = self.plan.buckets[index].scheme
                sent, state = _weighted(vector, weight, scheme), self.states.read(index, rescale)
                again[index] = scheme.exchange(sent, state, self.wire, self._name(index))
            return again

        def count_again() -> tuple[dict[int, Any], tf.Tensor, tf.Tensor]:
            with names_ending_in(".again"):
                total, are_equal = self._count_all(expected.count)
                weight = weight_of(expected.count, total, self.wire.topology.size)
                # Reuse the first result for equal batches: it is correct for any batch size.
                exact = tf.cond(are_equal, lambda: found, lambda: exchange(weight))
                return exact, total, are_equal

        found, total, are_equal = tf.cond(
            expected.were_wrong, count_again, lambda: (found, expected.total, expected.are_equal)
        )
        with tf.device("/CPU:0"):
            known = tf.where(are_equal, total, 0.0)
            self._expected.assign(tf.where(expected.were_all, known, self._expected))
        return found

    def _name(self, bucket: int) -> str:
        return f"{self.prefix}.bucket_{bucket}"

    def _keep_sizes(self, sizes: dict[int, tf.Tensor]) -> None:
        if sizes:
            with tf.device("/CPU:0"):
                count = self.sizes.shape[0]
                new = tf.stack([sizes.get(index, tf.zeros([])) for index in range(count)])
                # A size of 0, as at the end of an epoch, is not representative.
                self.sizes.assign(tf.where(new > 0.0, new, self.sizes))

    @tf.function(autograph=False)
    def contribute_to_call(self, call: int) -> tf.Tensor:
        """Joins `join_call` on a rank with exhausted input; returns the number of such ranks."""
        with names_ending_in(_number(call)):
            return self.join_call(0.0, True, has_batch=False)[2]

    def join(self, call: int, eagerly: bool, afterwards: Afterwards | None = None) -> bool:
        """Joins one exchange of a step with zeros; returns true if no rank has a batch."""
        contribute = self.contribute_nothing
        # Pass `afterwards` as an argument, so that TensorFlow traces again for another function.
        absent, _ = (contribute.python_function if eagerly else contribute)(call, afterwards)
        return int(absent) == self.wire.topology.size

    @tf.function(autograph=False)
    def contribute_nothing(
        self, call: int, afterwards: Afterwards | None
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Joins an exchange with zeros; returns the number of such ranks, and tensors to fetch."""
        nothing = [None] * len(self.plan.descriptions)
        with names_ending_in(_number(call)):
            # Discard the new state: no rank updates its state in a step without full participation.
            share = self.share(nothing, 0.0, has_batch=False)
            means, _ = self.exchange(nothing, share.weight, share.expectation)
            if afterwards is not None:
                means = afterwards(means)
        # The caller fetches the tensors, because TensorFlow prunes unused collectives.
        return share.presence.absent, [tf.reduce_sum(mean) for mean in means]


def _weighted(vector: tf.Tensor, weight: tf.Tensor | None, scheme: Scheme) -> tf.Tensor:
    if weight is None:
        return vector
    weight = weight if scheme.averages else tf.sign(weight)
    # For equal batches, the weight is exactly 1: skip the multiplication, which would be another
    # pass over the vector. Ignore gradients of empty batches: their mean is NaN.
    factor = tf.cast(weight, vector.dtype)
    return tf.cond(weight == 1.0, lambda: vector, lambda: tf.math.multiply_no_nan(vector, factor))


def _number(call: int) -> str:
    return f".{call}" if call else ""


def _variable(shape: Sequence[int], name: str) -> tf.Variable:
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(tf.zeros(shape), trainable=False, name=name)
