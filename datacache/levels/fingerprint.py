"""What a cached sample depends on, as a number: another fingerprint is another cache."""

from __future__ import annotations

import graphlib
import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from datacache.sources.source import Source, digest

log = logging.getLogger("datacache")
PYTHON = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}


@dataclass(frozen=True)
class Traced:
    """The way from a stored sample to a cached one, as a graph.

    Attributes:
      function: Takes the stored components, returns the sample's components in one list.
      structure: Nested `tf.TensorSpec`s of a sample.
      fingerprint: SHA-256 of the graph with all constants that it captured, in hexadecimal.
      preprocess: What was traced: graphs do not keep the variables alive that they use.
    """

    function: Callable[..., list[tf.Tensor]]
    structure: Any
    fingerprint: str
    preprocess: Any

    @property
    def shapes(self) -> list[tf.TensorShape]:
        """Of a sample's components, as far as the graph knows them."""
        return [spec.shape for spec in tf.nest.flatten(self.structure)]


def traced(source: Source, preprocess: Callable[..., Any] | None) -> Traced:
    """Traces `preprocess`, as `tf.data.Dataset.map` would: tuples are arguments, anything else is one.

    Raises:
      ValueError: If it returns something that is not made of tensors.
    """
    structure: Any = None

    def whole(*stored: Any) -> list[tf.Tensor]:
        nonlocal structure
        decoded = source.decode(*stored)
        if preprocess is not None:
            decoded = preprocess(*decoded) if isinstance(decoded, tuple) else preprocess(decoded)
        structure = tf.nest.map_structure(_component, decoded)
        return [tf.convert_to_tensor(part) for part in tf.nest.flatten(decoded)]

    with tf.device("CPU:0"):
        concrete = tf.function(whole).get_concrete_function(*source.signature)
    _warn(concrete.graph)
    return Traced(concrete, structure, _fingerprint(concrete), preprocess)


def fingerprint(source: Source, traced: Traced, version: Any) -> str:
    """Of all that samples depend on: 64 hexadecimal digits."""
    # Another TensorFlow may decode otherwise.
    return digest(
        [source.identity, repr(traced.structure), traced.fingerprint, tf.__version__, version]
    )


def _component(part: Any) -> tf.TensorSpec:
    if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"A sample must be made of dense tensors. Received: {type(part).__name__} from `preprocess`. Return "
            "part.to_tensor(), and say variable_shapes=True."
        )
    part = tf.convert_to_tensor(part)
    return tf.TensorSpec(part.shape, part.dtype)


def _fingerprint(concrete: Any) -> str:
    graph = concrete.graph
    definition = graph.as_graph_def()
    bodies = {function.signature.name: function for function in definition.library.function}
    arguments = [tensor.op.name for tensor in graph.inputs]
    outputs = [f"{tensor.op.name}:{tensor.value_index}" for tensor in graph.outputs]
    captures = [_of_capture(captured, graph.variables) for captured in concrete.captured_inputs]
    return digest([_of_outputs(definition.node, arguments, outputs, bodies, ()), captures])


def _of_outputs(
    nodes: Any,
    arguments: Sequence[str],
    outputs: Sequence[str],
    bodies: dict[str, Any],
    within: tuple[str, ...],
) -> str:
    """Of what outputs are made of: names of nodes and functions, and their order, differ between processes."""
    known = {name: f"argument {place}" for place, name in enumerate(arguments)}

    def of_tensor(name: str) -> list[str]:
        node, _, output = name.removeprefix("^").partition(":")
        return [name[: name.startswith("^")], known[node], output]

    for node in _from_arguments(nodes):
        if node.name not in known:
            attributes = {
                name: _of_attribute(value, bodies, within)
                for name, value in node.attr.items()
                if not name.startswith("_") and not (node.op in PYTHON and name == "token")
            }
            controls = sorted(of_tensor(name) for name in node.input if name.startswith("^"))
            inputs = [of_tensor(name) for name in node.input if not name.startswith("^")]
            known[node.name] = digest([node.op, attributes, inputs, controls])
    return digest([of_tensor(name) for name in outputs])


def _from_arguments(nodes: Any) -> Iterator[Any]:
    """Each node after those that it reads."""
    by_name = {node.name: node for node in nodes}
    reads = {
        node.name: [name.removeprefix("^").partition(":")[0] for name in node.input]
        for node in nodes
    }
    for name in graphlib.TopologicalSorter(reads).static_order():
        if name in by_name:
            yield by_name[name]


def _of_attribute(value: Any, bodies: dict[str, Any], within: tuple[str, ...]) -> str:
    functions = [value.func] if value.HasField("func") else value.list.func
    if not functions:
        return hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()
    return digest([_of_function(function, bodies, within) for function in functions])


def _of_function(function: Any, bodies: dict[str, Any], within: tuple[str, ...]) -> str:
    attributes = {
        name: _of_attribute(value, bodies, within) for name, value in function.attr.items()
    }
    if function.name not in bodies or function.name in within:
        return digest([function.name, attributes])
    body = bodies[function.name]
    arguments = [argument.name for argument in body.signature.input_arg]
    outputs = [body.ret[output.name] for output in body.signature.output_arg]
    return digest(
        [
            attributes,
            _of_outputs(body.node_def, arguments, outputs, bodies, (*within, function.name)),
        ]
    )


def _of_capture(captured: Any, variables: Any) -> str:
    """Of a tensor or of a variable's value."""
    if captured.dtype == tf.resource:
        variable = next((variable for variable in variables if variable.handle is captured), None)
        if variable is None:
            log.warning(
                "datacache: `preprocess` uses a table or another resource, whose contents the cache cannot see: "
                "pass another `version` when they change"
            )
            return "resource"
        captured = variable.read_value()
    array = np.asarray(captured)
    content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
    return digest([str(array.dtype), array.shape, hashlib.sha256(content).hexdigest()])


def _warn(graph: Any) -> None:
    operations = [*graph.get_operations()]
    names = {op.type for op in operations}
    for function in graph.as_graph_def().library.function:
        names |= {node.op for node in function.node_def}
    if names & PYTHON:
        log.warning(
            "datacache: `preprocess` calls Python code, which the cache cannot see: pass another `version` when it "
            "changes"
        )
    random = sorted(
        name
        for name in names
        if re.match(r"(Stateful)?(Random|Truncated|Parameterized|Multinomial)", name)
    )
    if random:
        log.warning(
            "datacache: `preprocess` draws at random (%s): each sample is drawn once and kept. Augment after the "
            "cache: cache.dataset(...).map(augment)",
            ", ".join(random),
        )
