"""Makes plans from descriptions, topology and policy, without communication.

Each rank makes its plan independently, and all plans must be equal. Therefore no decision may
depend on data that differs between ranks, and no order may come from a set. This module also
rejects plans that the inner optimizer does not support, and gives advice on unsuitable plans.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import keras
import tensorflow as tf

from tfposeidon import native
from tfposeidon.communication.topology import Topology
from tfposeidon.gradients import Description, GradientReader, Structure
from tfposeidon.optimizers.wrapper import leaves
from tfposeidon.policies import Choice, Policy
from tfposeidon.schemes.base import Scheme, Slot
from tfposeidon.schemes.dense import AllReduce, Largest
from tfposeidon.schemes.stages import Cost, total_cost
from tfposeidon.text import readable_size, table

DEFAULT_BUCKET_BYTES = 4 * 2**20
"""Default maximum size in bytes of a bucket of fused gradients; `auto` also tries other sizes."""

COLUMNS = (
    "bucket",
    "variable",
    "shape",
    "dtype",
    "scheme",
    "within the node",
    "across nodes",
    "reason",
)
"""Columns of a printed plan."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are exchanged together, as one vector or each by its structure.

    Attributes:
      members: Indices of the bucket's variables in the plan's list of variables, in descending
        order.
      descriptions: Descriptions of the gradients, in the same order, all of one dtype.
      scheme: Scheme that exchanges the bucket.
      choices: Choice of the policy for each variable, with its reason and the schemes that were
        compared, in the same order.
    """

    members: tuple[int, ...]
    descriptions: tuple[Description, ...]
    scheme: Scheme
    choices: tuple[Choice, ...]

    @property
    def length(self) -> int:
        """Number of elements of all gradients."""
        return sum(d.length for d in self.descriptions)

    @property
    def bytes(self) -> int:
        """Size of all gradients in bytes."""
        return sum(d.bytes for d in self.descriptions)

    @property
    def dtype(self) -> str:
        """Dtype in which the gradients are exchanged."""
        return self.descriptions[0].dtype

    @property
    def structures(self) -> tuple[Structure, ...]:
        """Structures of the gradients; empty if the scheme exchanges whole gradients."""
        found = [d.structure for d in self.descriptions if d.structure is not None]
        return tuple(found) if self.scheme.reader else ()

    def slots(self, topology: Topology) -> tuple[Slot, ...]:
        """Describes the scheme's float32 state tensors for the bucket on `topology.rank`."""
        return self.scheme.slots(self.length, topology)

    def cost(self, topology: Topology) -> Cost:
        """Predicts the communication of `topology.rank` for one exchange of the bucket.

        Args:
          topology: Topology of the job, as seen from the rank whose cost is returned.

        Returns:
          Predicted cost of one exchange; bytes are payload without headers.
        """
        itemsize = self.descriptions[0].itemsize
        stages = self.scheme.bucket_stages(self.length, itemsize, self.structures, topology)
        return total_cost(stages, topology)

    def sized(self, size: float, policy: Policy, topology: Topology) -> Bucket:
        """Returns the bucket of a step in which the structures of all ranks have a total `size`."""
        if not self.structures or not size:
            return self
        of_each = size / len(self.members) / topology.size
        known = tuple(d.sized(of_each) for d in self.descriptions)
        # Choose again only without a planner, because choices of planners ignore the size.
        again = tuple(_choose(policy, d, topology) for d in known) if policy.is_fixed else ()
        return replace(self, descriptions=known, choices=again or self.choices).fitted(topology)

    def fitted(self, topology: Topology) -> Bucket:
        """Returns the bucket with its scheme replaced by a scheme that fits its structures."""
        if not self.structures:
            return self
        return replace(self, scheme=self.scheme.fitted(self.structures[0], topology))


class Forecast(Protocol):
    """A planner's prediction for a plan: a dataclass that is printed and saved with the plan."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def lines(self) -> Iterator[str]:
        """Yields the lines of the forecast in the printed plan."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Scheme, bytes and reason for each variable. `print` the plan, or call `to_json()`.

    Attributes:
      buckets: Buckets in the order in which the backward pass completes their gradients.
      topology: Topology of the job, as seen from this rank.
      notes: Remarks on unexpected results of planning, with their reasons.
      forecasts: Predicted step for each list of variables that the optimizer is called with; empty
        if the network profile is unknown, or on a single rank.
      occasion: Event in which each rank sends the plan's bytes once: `"step"` (default),
        `"exchange"` or `"synchronization"`.

    Example:
      >>> from tfposeidon import policies
      >>> layers = [Description("dense/kernel", (784, 10), "float32"),
      ...           Description("dense/bias", (10,), "float32")]
      >>> topology = Topology.regular(0, 4, ranks_per_node=1)
      >>> plan = make_plan(layers, policies.parse("alltoall"), topology)
      >>> [(bucket.scheme.name, bucket.members) for bucket in plan.buckets]
      [('alltoall', (1, 0))]
      >>> int(plan.cost.cross_bytes), plan.cost.steps
      (47096, 6)
    """

    buckets: tuple[Bucket, ...]
    topology: Topology
    notes: tuple[str, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    occasion: str = "step"

    @cached_property
    def cost(self) -> Cost:
        """Cost of all buckets together, for this rank."""
        return sum((bucket.cost(self.topology) for bucket in self.buckets), Cost())

    @cached_property
    def descriptions(self) -> tuple[Description, ...]:
        """Descriptions of the gradients, in the order of the variables."""
        found = _by_member(self.buckets)
        return tuple(found[member] for member in sorted(found))

    @cached_property
    def structured(self) -> dict[int, Description]:
        """Descriptions of the gradients whose structure is exchanged, by index of the variable."""
        return _by_member(bucket for bucket in self.buckets if bucket.structures)

    @property
    def reader(self) -> GradientReader | None:
        """Reader of the structures in `structured`; `None` if no structure is exchanged."""
        return next((bucket.scheme.reader for bucket in self.buckets if bucket.structures), None)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the variables, in their order."""
        return tuple(description.path for description in self.descriptions)

    @cached_property
    def digest(self) -> str:
        """Digest of schemes, buckets, shapes and structures, but not of paths, which may differ."""
        content = [
            (b.scheme, b.members, [(d.shape, d.dtype) for d in b.descriptions], b.structures)
            for b in self.buckets
        ]
        return hashlib.sha256(repr(content).encode()).hexdigest()

    def to_json(self) -> str:
        """Returns the plan as JSON.

        Returns:
          JSON text with the topology, the remarks, the forecasts, the scheme of each bucket with
          its options and cost, and for each variable the reason and the bytes of each scheme that
          was compared.
        """
        content = {
            "nodes": self.topology.nodes,
            "rank": self.topology.rank,
            "buckets": [self._bucket_to_dict(bucket) for bucket in self.buckets],
            "notes": self.notes,
            "forecasts": [*map(asdict, self.forecasts)],
        }
        return json.dumps(content, indent=2)

    def _bucket_to_dict(self, bucket: Bucket) -> dict[str, Any]:
        return {
            "scheme": bucket.scheme.name,
            "options": keras.saving.serialize_keras_object(bucket.scheme)["config"],
            "dtype": bucket.dtype,
            "variables": [
                {
                    "path": d.path,
                    "shape": d.shape,
                    "reason": choice.reason,
                    "candidates": dict(choice.candidates),
                }
                for d, choice in zip(bucket.descriptions, bucket.choices, strict=True)
            ],
            "cost": asdict(bucket.cost(self.topology)),
        }

    def __str__(self) -> str:
        """Returns the plan as a table with one row per variable."""
        rank = self.topology.rank
        rows: list[tuple[str, ...]] = []
        for index, bucket in enumerate(self.buckets):
            number, scheme, reason = str(index), str(bucket.scheme), ""
            sizes = _sizes(bucket.cost(self.topology))
            for d, choice in zip(bucket.descriptions, bucket.choices, strict=True):
                shape = "x".join(map(str, d.shape)) or "scalar"
                # Show a reason once if consecutive variables of a bucket have the same.
                why = "" if choice.reason == reason else choice.reason
                rows.append((number, d.path, shape, d.dtype, scheme, *sizes, why))
                number, scheme, sizes, reason = "", "", ("", ""), choice.reason
        total = ("total", "", "", "", "", *_sizes(self.cost), "")
        return "\n".join(
            [
                f"Plan for {self.topology}: bytes that rank {rank} sends per {self.occasion}",
                *table([COLUMNS, *rows, total]),
                *(f"note: {note}" for note in self.notes),
                *(line for forecast in self.forecasts for line in forecast.lines()),
            ]
        )


def _by_member(buckets: Iterable[Bucket]) -> dict[int, Description]:
    """Returns the descriptions of some buckets, by index of the variable."""
    pairs = (zip(bucket.members, bucket.descriptions, strict=True) for bucket in buckets)
    return dict(itertools.chain(*pairs))


def _sizes(cost: Cost) -> tuple[str, str]:
    return readable_size(cost.node_bytes), readable_size(cost.cross_bytes)


def make_plan(
    descriptions: Sequence[Description],
    policy: Policy,
    topology: Topology,
    bucket_bytes: int | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """Assigns schemes, and fuses small gradients into buckets, last variables first.

    A variable of at least a quarter of `bucket_bytes` has a bucket of its own, which saves a copy.
    Smaller variables share a bucket of up to `bucket_bytes` if they have equal schemes and dtypes,
    and equal structures if the scheme exchanges structures. Buckets are in the order in which the
    last of their gradients is computed. `bucket_bytes=None` means the default size, and 0 disables
    fusion. The plans of all ranks differ only in `topology.rank`.

    Source: Zhang et al. 2017 (Poseidon), section 3.1. Differs: Poseidon does not fuse.
    """
    choices = [_choose(policy, description, topology) for description in descriptions]
    singles = [
        Bucket(members=(i,), descriptions=(d,), scheme=choices[i].scheme, choices=(choices[i],))
        for i, d in enumerate(descriptions)
    ]
    most_bytes = DEFAULT_BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    # The backward pass starts with the last layers (wait-free backpropagation).
    buckets = [bucket.fitted(topology) for bucket in _fused(reversed(singles), most_bytes)]
    remarks = [bucket.scheme.note(bucket.length, topology) for bucket in buckets]
    remarks = [f"bucket {i}: {remark}" for i, remark in enumerate(remarks) if remark]
    notes = (*notes, *policy.notes(descriptions), *remarks)
    return Plan(buckets=tuple(buckets), topology=topology, notes=notes)


def sized(plan: Plan, sizes: Sequence[float], policy: Policy) -> Plan:
    """Returns the plan of a step; `sizes` has the size of each bucket's structures, or 0."""
    # `sizes` may be longer than the list of buckets, because exchangers allocate one per variable.
    pairs = zip(plan.buckets, sizes, strict=False)
    buckets = [bucket.sized(float(size), policy, plan.topology) for bucket, size in pairs]
    return replace(plan, buckets=tuple(buckets))


def _fused(singles: Iterable[Bucket], bucket_bytes: int) -> list[Bucket]:
    """Fuses buckets of one variable each, in their order; see `make_plan`."""
    groups: list[list[Bucket]] = []
    filling: dict[Any, tuple[int, list[Bucket]]] = {}
    for single in singles:
        size_bytes = single.bytes
        if 4 * size_bytes >= bucket_bytes:
            groups.append([single])
            continue
        # Structures must be equal, because each step fits one scheme to all structures of a bucket.
        key = (single.scheme, single.dtype, single.structures)
        filled_bytes, group = filling.get(key, (bucket_bytes, []))
        if filled_bytes + size_bytes > bucket_bytes:
            filled_bytes, group = 0, []
            groups.append(group)
        group.append(single)
        filling[key] = filled_bytes + size_bytes, group
    buckets = [
        replace(
            group[0],
            members=tuple(member for one in group for member in one.members),
            descriptions=tuple(d for one in group for d in one.descriptions),
            choices=tuple(choice for one in group for choice in one.choices),
        )
        for group in groups
    ]
    # A bucket can be sent once the gradient of its last member exists.
    return sorted(buckets, key=lambda bucket: -bucket.members[-1])


def _choose(policy: Policy, description: Description, topology: Topology) -> Choice:
    """Returns the policy's choice, or another scheme if its scheme does not suit the variable."""
    if description.is_value:
        return Choice(Largest(), "replaces the value of the variable")
    choice = policy.choose(description, topology)
    scheme = choice.scheme
    if refusal := scheme.refusal(description):
        return replace(choice, scheme=AllReduce(), reason=refusal)
    if description.length >= scheme.min_length:
        return choice
    reason = f"fewer than {scheme.min_length} elements for {scheme.name}"
    return replace(choice, scheme=scheme.for_small_variables or AllReduce(), reason=reason)


def cpu_advice(plan: Plan) -> str:
    """Returns advice if native ops copy GPU tensors to the CPU and back, else `""`."""
    # Schemes with state select elements with native ops.
    names = {bucket.scheme.name for bucket in plan.buckets if bucket.slots(plan.topology)}
    if not names or not tf.config.list_physical_devices("GPU") or native.has_gpu_kernels():
        return ""
    return (
        f"{', '.join(sorted(names))}: messages are computed on the CPU, because tfposeidon was "
        "built without nvcc: install CUDA and build tfposeidon again"
    )


def sparsity_advice(plan: Plan, inner: Any) -> str:
    """Returns advice if the inner optimizer does not suit sparse gradients, else `""`."""
    sparse = [bucket.scheme for bucket in plan.buckets if bucket.slots(plan.topology)]
    if not sparse:
        return ""
    name = sparse[0].name
    # Check the least suitable optimizer of several.
    optimizer = min(leaves(inner), key=lambda leaf: isinstance(leaf, keras.optimizers.SGD))
    if not isinstance(optimizer, keras.optimizers.SGD):
        return (
            f"{type(optimizer).__name__} is not linear in the gradient: it treats gradients that "
            f"{name} has not sent yet as zeros; SGD, or a dense scheme, is more suitable"
        )
    if len({bucket.scheme.corrects_momentum for bucket in plan.buckets}) > 1:
        return (
            "momentum correction applies to some variables only; the others have no momentum, "
            "because the optimizer's momentum must be 0"
        )
    if not optimizer.momentum:
        return ""
    advice = f"momentum after {name} acts on delayed gradients"
    # Only some schemes support momentum correction.
    if hasattr(sparse[0], "momentum"):
        advice += (
            f": use SGD(momentum=0.0) with {type(sparse[0]).__name__}"
            f"(momentum={optimizer.momentum}) instead, which applies momentum before selection"
        )
    return advice


def check_optimizer(plan: Plan, inner: Any) -> None:
    """Raises `ValueError` for schemes that the inner optimizer does not support."""
    corrected = {bucket.scheme.name for bucket in plan.buckets if bucket.scheme.corrects_momentum}
    moved = [leaf for leaf in leaves(inner) if getattr(leaf, "momentum", 0.0)]
    if corrected and moved:
        raise ValueError(
            "With momentum correction, the optimizer's momentum must be 0. Received: momentum in "
            f"{', '.join(sorted(corrected))} and in {type(moved[0]).__name__}. Use "
            "SGD(momentum=0.0)."
        )
    sparse = {b.scheme.name for b in plan.buckets if getattr(b.scheme, "density", 1.0) < 1.0}
    if sparse and any(isinstance(leaf, keras.optimizers.Adafactor) for leaf in leaves(inner)):
        raise ValueError(
            "Adafactor requires a scheme that sends all elements: its means over rows and "
            "columns are zero if no element was sent, and weights become NaN. Received: "
            f"Adafactor with {', '.join(sorted(sparse))}. Use Adam, or a scheme that sends all "
            'elements, such as "alltoall".'
        )
