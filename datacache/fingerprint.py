"""What a cached sample depends on, as a number: another fingerprint is another cache."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from datacache.sources.source import Source, digest

log = logging.getLogger("tfposeidon")
PYTHON = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}


@dataclass(frozen=True)
class Traced:
    """The way from a stored sample to a cached one, as a graph.

    Attributes:
      function: Takes the stored components, returns the sample's components in one list.
      structure: Nested `tf.TensorSpec`s of a sample.
      fingerprint: SHA-256 of the graph with all constants that it captured, in hexadecimal.
    """

    function: Callable[..., list[tf.Tensor]]
    structure: Any
    fingerprint: str

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
    return Traced(concrete, structure, _fingerprint(concrete))


def fingerprint(source: Source, traced: Traced, version: Any) -> str:
    """Of all that samples depend on: 64 hexadecimal digits."""
    return digest([source.identity, repr(traced.structure), traced.fingerprint, version])


def _component(part: Any) -> tf.TensorSpec:
    if isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"A sample must be made of dense tensors. Received: {type(part).__name__} from `preprocess`. Return "
            "part.to_tensor(), and say variable_shapes=True."
        )
    part = tf.convert_to_tensor(part)
    return tf.TensorSpec(part.shape, part.dtype)


def _fingerprint(concrete: Any) -> str:
    graph = concrete.graph.as_graph_def()
    bodies = {function.signature.name: function for function in graph.library.function}
    captures = [_of_capture(captured, concrete.graph.variables) for captured in concrete.captured_inputs]
    return digest([_of_nodes(graph.node, bodies, ()), captures])


def _of_nodes(nodes: Any, bodies: dict[str, Any], within: tuple[str, ...]) -> str:
    """Names of functions are numbered as they come in a process, so their bodies stand for them."""
    lines = []
    for node in nodes:
        attributes = {
            name: _of_attribute(value, bodies, within)
            for name, value in node.attr.items()
            if not name.startswith("_") and not (node.op in PYTHON and name == "token")
        }
        lines.append([node.name, node.op, list(node.input), attributes])
    return digest(lines)


def _of_attribute(value: Any, bodies: dict[str, Any], within: tuple[str, ...]) -> str:
    name = value.func.name
    if name not in bodies or name in within:
        return hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()
    body = bodies[name]
    return digest([_of_nodes(body.node_def, bodies, (*within, name)), sorted(body.ret.items())])


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
        name for name in names if re.match(r"(Stateful)?(Random|Truncated|Parameterized|Multinomial)", name)
    )
    if random:
        log.warning(
            "datacache: `preprocess` draws at random (%s): each sample is drawn once and kept. Augment after the "
            "cache: cache.dataset(...).map(augment)",
            ", ".join(random),
        )
