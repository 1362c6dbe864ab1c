"""Creates exchanges by name, and computes the bytes that they send."""

import dataclasses
import re

from benchmarks import baselines
from tfposeidon import ops
from tfposeidon.factors.pairs import FactorShape
from tfposeidon.schemes import REGISTRY
from tfposeidon.schemes.stages import Transfer, total_cost
from tfposeidon.schemes.wire_format import WIRE_DTYPES

SCHEMES = {**REGISTRY, **baselines.SYSTEMS}
ITEMSIZE = 4
DENSITIES, PRODUCT_ROWS = {"select": 0.01, "select_many": 0.1, "scatter": 0.01}, 256
"""Shares of elements in local work on pairs, and rows of factors in local work on products."""


def scheme_named(name):
    """Returns a scheme by its name, with options after colons.

    Args:
      name: Name such as "torus2d:float16" or "hitopk:0.001:exact".
    """
    name, *options = name.split(":")
    scheme = SCHEMES[name]()
    for option in options:
        scheme = dataclasses.replace(scheme, **{_field(option): _value(option)})
    return scheme


def _field(option):
    if option in ops.METHODS:
        return "select"
    return "wire_dtype" if option in WIRE_DTYPES else "density"


def _value(option):
    return option if option in (*ops.METHODS, *WIRE_DTYPES) else float(option)


def one_server_each(lengths, ranks):
    """Returns the rules of "ps-adam": a server per dense kernel, "ps" for other variables.

    Args:
      lengths: Number of elements of each variable by path, in the order of the layers.
      ranks: Number of ranks.
    """
    # The gradient of the last layer appears first.
    kernels = [item for item in lengths.items() if re.search("dense[0-9]+/kernel", item[0])]
    return [*baselines.balanced(reversed(kernels), ranks), (".*", "ps")]


def factors_named(system, size):
    """Returns a scheme of sufficient factors, and the shape of one rank's factors.

    Args:
      system: Name such as "factors:32", for 32 rows on each rank.
      size: Shape of the matrix, such as "1024x4096".
    """
    name, rows = system.split(":")
    left, right = map(int, size.split("x"))
    return SCHEMES[name](), FactorShape(int(rows), left, right, "float32")


def transfer_named(system, length, topology):
    """Returns a single collective.

    Args:
      system: Name such as "all_gather@across": operation and group of ranks; "16" after the
        operation means float16.
      length: Number of values on each rank.
      topology: The ranks of the job.
    """
    operation, name = system.split("@")
    itemsize = 2 if operation.endswith("16") else ITEMSIZE
    group = getattr(topology, name)
    return Transfer.of_vector(operation.removesuffix("16"), group, length, itemsize=itemsize)


def stages_named(system, size, topology):
    """Returns the stages of an exchange on `topology.rank`.

    Args:
      system: Name of a scheme, of a collective or of local work.
      size: Number of values, or the shape of a matrix.
      topology: The ranks of the job.
    """
    if system.endswith("@work"):
        return ()
    if "@" in system:
        return (transfer_named(system, int(size), topology),)
    if "x" in size:
        scheme, factors = factors_named(system, size)
        return scheme.factor_stages(factors, topology)
    return scheme_named(system).stages(int(size), ITEMSIZE, topology)


def sent_by_node(system, size, topology):
    """Returns the payload bytes that each node sends to other nodes in an exchange."""
    return [
        sum(
            total_cost(stages_named(system, size, seen), seen).cross_bytes
            for seen in map(topology.seen_from, node)
        )
        for node in topology.nodes
    ]


def busiest_node_bytes(system, size, topology):
    """Returns the payload bytes of the node that sends most."""
    return max(sent_by_node(system, size, topology))
