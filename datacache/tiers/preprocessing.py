"""Traces the function that computes a cached sample from a stored sample, and digests its graph."""

from __future__ import annotations

import contextlib
import graphlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from datacache.from_tfposeidon import pipelines
from datacache.graphs import warn_of_draws
from datacache.pool.spec import Arrays
from datacache.sources.source import Source, SourceError, array_digest, digest

log = logging.getLogger("datacache")
PARALLEL_ITERATIONS = 8
"""Number of samples that one call decodes in parallel; windows are decoded concurrently, too."""
Names = Sequence[str]


class Preprocessing:
    """Computes cached samples from stored samples; traces the function like `tf.data.Dataset.map`.

    `structure` contains the nested `tf.TensorSpec`s of a cached sample. `fingerprint` is a digest
    of the graph and of all captured constants.
    """

    def __init__(
        self, source: Source, preprocess: Callable[..., Any] | None, variable_shapes: bool = False
    ) -> None:
        self._name, self.variable_shapes = source.name, variable_shapes
        self.structure: Any = None
        # Refer to `preprocess`, because the graph does not keep its variables alive.
        self._preprocess = preprocess

        def decode_and_preprocess(*stored: Any) -> list[tf.Tensor]:
            made = self._structured(source.decode(*stored))
            self.structure = tf.nest.map_structure(_component_spec, made)
            return [tf.convert_to_tensor(part) for part in tf.nest.flatten(made)]

        with tf.device("CPU:0"):
            traced = tf.function(decode_and_preprocess).get_concrete_function(*source.signature)
        _warn_of_unseen(traced.graph)
        self._function, self.fingerprint = traced, _graph_fingerprint(traced)
        # Do not batch samples of different shapes, which do not fit in one tensor.
        same_shapes = all(spec.shape.is_fully_defined() for spec in source.signature)
        can_batch = same_shapes and not variable_shapes
        self._batched: Any = self._trace_batched(source.signature) if can_batch else None

    def __call__(self, stored: list[Arrays], indices: np.ndarray) -> list[Arrays]:
        """Computes cached samples; `indices` identify the samples in errors."""
        if self._batched is not None and len(stored) > 1:
            # Retry one by one after a failure, because the error does not identify the sample.
            with contextlib.suppress(tf.errors.OpError):
                columns = [np.stack(column) for column in zip(*stored, strict=True)]
                made = [part.numpy() for part in self._batched(*columns)]
                return [list(parts) for parts in zip(*made, strict=True)]
        pairs = zip(stored, indices.tolist(), strict=True)
        return [self._one(components, sample) for components, sample in pairs]

    def _one(self, components: Arrays, sample: int) -> Arrays:
        try:
            return [part.numpy() for part in self._function(*components)]
        except tf.errors.OpError as error:
            # The last paragraph is the cause. The others show where each op was traced.
            cause = error.message.rsplit("\n\n", 1)[-1].splitlines()[0].rstrip(".")
            raise SourceError(
                "`preprocess` must accept every sample. Received: "
                f"{cause} for {self._name(sample)}. Correct `preprocess`, or remove the sample."
            ) from error

    def _structured(self, decoded: Any) -> Any:
        if self._preprocess is not None:
            decoded = decoded if isinstance(decoded, tuple) else (decoded,)
            decoded = self._preprocess(*decoded)
        made = _without_lists(decoded)
        if not tf.nest.flatten(made):
            raise ValueError(
                f"A sample must have at least one tensor. Received: {made!r} from `preprocess`. "
                "Return the tensors to cache."
            )
        return made

    def _trace_batched(self, signature: Sequence[Any]) -> Any:
        def preprocess_batch(*columns: tf.Tensor) -> Any:
            return tf.map_fn(
                lambda components: self._function(*components),
                columns,
                fn_output_signature=tf.nest.flatten(self.structure),
                parallel_iterations=PARALLEL_ITERATIONS,
            )

        columns = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in signature]
        with tf.device("CPU:0"):
            # Trace the function now, because several threads could otherwise trace it concurrently.
            return tf.function(preprocess_batch, columns, autograph=False).get_concrete_function()


def _without_lists(structure: Any) -> Any:
    """Converts the lists of a structure to tensors, as `tf.data` does."""

    def converted(part: Any) -> tf.Tensor | None:
        if not isinstance(part, list):
            return None
        try:
            return tf.convert_to_tensor(part)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "A list in a sample must convert to one tensor, as in tf.data. Received: "
                f"{part!r:.200} from `preprocess`. Return its parts as a tuple or a dictionary."
            ) from error

    return keras.tree.traverse(converted, structure)


def _component_spec(part: Any) -> tf.TensorSpec:
    if part is None or isinstance(part, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            "A sample must consist of dense tensors. Received: "
            f"{type(part).__name__} from `preprocess`. Remove None; return ragged.to_tensor() or "
            "tf.sparse.to_dense(sparse), and pass variable_shapes=True."
        )
    part = tf.convert_to_tensor(part)
    return tf.TensorSpec(part.shape, part.dtype)


def _graph_fingerprint(concrete: Any) -> str:
    graph = concrete.graph
    definition = graph.as_graph_def()
    bodies = {function.signature.name: function for function in definition.library.function}
    arguments = [tensor.op.name for tensor in graph.inputs]
    outputs = [f"{tensor.op.name}:{tensor.value_index}" for tensor in graph.outputs]
    captures = [_capture_digest(captured, graph.variables) for captured in concrete.captured_inputs]
    return digest([_outputs_digest(definition.node, arguments, outputs, bodies, ()), captures])


def _outputs_digest(
    nodes: Any, arguments: Names, outputs: Names, bodies: dict[str, Any], within: tuple[str, ...]
) -> str:
    # Describe each node by its op, its attributes and the digests of its inputs, because the order
    # of nodes and the names of nodes and functions differ between processes.
    known = {name: f"argument {index}" for index, name in enumerate(arguments)}

    def tensor_key(name: str) -> list[str]:
        node, _, output = name.removeprefix("^").partition(":")
        return [name[: name.startswith("^")], known[node], output]

    by_name = {node.name: node for node in nodes}
    for name in _in_order_of_inputs(nodes):
        if name in by_name and name not in known:
            node = by_name[name]
            # Skip attributes with an underscore, which are TensorFlow's annotations, and the token
            # of a Python function, which differs between processes.
            counted = node.op in pipelines.PYTHON_OPS
            attributes = {
                key: _attribute_digest(value, bodies, within)
                for key, value in node.attr.items()
                if not key.startswith("_") and not (counted and key == "token")
            }
            keys = [tensor_key(one) for one in node.input]
            inputs = [key for key in keys if not key[0]]
            controls = sorted(key for key in keys if key[0])
            known[name] = digest([node.op, attributes, inputs, controls])
    return digest([tensor_key(name) for name in outputs])


def _in_order_of_inputs(nodes: Any) -> Iterable[str]:
    """Returns the names of nodes, each after its inputs."""
    reads = {
        node.name: [name.removeprefix("^").partition(":")[0] for name in node.input]
        for node in nodes
    }
    return graphlib.TopologicalSorter(reads).static_order()


def _attribute_digest(value: Any, bodies: dict[str, Any], within: tuple[str, ...]) -> str:
    functions = [value.func] if value.HasField("func") else value.list.func
    if not functions:
        return hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()
    return digest([_function_digest(function, bodies, within) for function in functions])


def _function_digest(function: Any, bodies: dict[str, Any], within: tuple[str, ...]) -> str:
    attributes = {
        name: _attribute_digest(value, bodies, within) for name, value in function.attr.items()
    }
    # Describe a recursive call by its name, because its body would include itself.
    if function.name not in bodies or function.name in within:
        return digest([function.name, attributes])
    body = bodies[function.name]
    arguments = [argument.name for argument in body.signature.input_arg]
    outputs = [body.ret[output.name] for output in body.signature.output_arg]
    within = (*within, function.name)
    return digest([attributes, _outputs_digest(body.node_def, arguments, outputs, bodies, within)])


def _capture_digest(captured: Any, variables: Any) -> str:
    """Returns a digest of a captured tensor, or of the value of a captured variable."""
    if captured.dtype == tf.resource:
        variable = next((variable for variable in variables if variable.handle is captured), None)
        if variable is None:
            _warn_uncovered("uses a lookup table or another resource", "its contents change")
            return "resource"
        captured = variable.read_value()
    return array_digest(np.asarray(captured))


def _warn_of_unseen(graph: Any) -> None:
    used = pipelines.op_names(graph)
    if used & pipelines.PYTHON_OPS:
        _warn_uncovered("calls Python code", "the code changes")
    if files := pipelines.file_ops(used):
        _warn_uncovered(f"reads files ({', '.join(sorted(files))})", "the files change")
    warn_of_draws("`preprocess`", pipelines.drawing_ops(used))


def _warn_uncovered(what: str, when: str) -> None:
    log.warning(
        "datacache: `preprocess` %s, which the fingerprint does not cover: change `version` when "
        "%s",
        what,
        when,
    )
