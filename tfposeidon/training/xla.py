"""Compiles the gradients of Keras's own train step with XLA, and not their exchange.

XLA can compile neither collectives nor top-k selection. A step that is compiled as one function
returns all gradients at its end, so that its communication is exposed. Several functions, each for
a part of the layers, return the gradients of this part when its backward pass ends.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism  # There is no public API.

from tfposeidon.training import session


def requested_functions(model: Any, optimizers: Sequence[Any], is_optional: bool) -> int:
    """Returns how many functions of the train step XLA compiles; 0 to build the step without XLA.

    With `is_optional`, an optimizer has to request them, because Keras can compile the whole step.
    """
    wanted = max(getattr(one, "xla_segments", None) or 0 for one in optimizers)
    # Keras stores what "auto" became, which is False without a GPU. With a GPU, `jit_compile` does
    # not show whether the user chose it, so only an optimizer requests XLA.
    may_be_users = model.jit_compile and not is_optional
    if not wanted and not (may_be_users and not tf.config.list_physical_devices("GPU")):
        return 0
    _check_support(model, wanted)
    return wanted or 1


def _check_support(model: Any, wanted: int) -> None:
    """Refuses models whose train step XLA cannot compile."""
    received = f"xla_segments={wanted}" if wanted else "jit_compile=True"
    remedy = "Leave xla_segments out." if wanted else "Pass jit_compile=False to compile."
    optimizer = session.without_loss_scale(model.optimizer)
    if not (session.trains_all_together(model) and session.is_distributed(optimizer)):
        raise ValueError(
            "XLA can compile only Keras's own train_step, because the optimizer must run outside "
            f"of the compiled functions. Received: {received} and a train_step or optimizers of "
            f"{type(model).__name__}. {remedy}"
        )
    unsupported = [layer.name for layer in model._flatten_layers() if not layer.supports_jit]
    found = {
        "run_eagerly=True": model.run_eagerly,
        "deterministic ops": _pywrap_determinism.is_enabled(),
        f"layers {unsupported}": unsupported,
    }
    if reason := next((text for text, is_so in found.items() if is_so), ""):
        raise ValueError(
            "XLA compiles only traced steps of layers that support it, without op determinism. "
            f"Received: {received} and {reason}. {remedy}"
        )


def compiled(
    model: Any, step: Callable[[Any], Any], functions: int
) -> Callable[[Any], dict[str, Any]]:
    """Returns a train step that computes the gradients of `step` in compiled functions."""

    def gradients(data: Any) -> tuple[list[list[Any]], dict[str, Any]]:
        found: list[list[Any]] = []
        with _replaced(model.optimizer, "apply", lambda grads, *_: found.append(list(grads))):
            logs = step(data)
        return found, logs

    def train_step(data: Any) -> dict[str, Any]:
        if functions > 1:
            with _segments(model, functions):
                return step(data)
        # Make a new function for each trace, because a step may be traced again after its first
        # trace has created variables.
        found, logs = tf.function(gradients, jit_compile=True, autograph=False)(data)
        for grads in found:
            model.optimizer.apply(grads, model.trainable_weights)
        return logs

    return train_step


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of an object within this context, for calls of this thread only."""
    thread, method, attributes = threading.get_ident(), getattr(owner, name), vars(owner)
    before = attributes.get(name)

    def called(*args: Any, **kwargs: Any) -> Any:
        is_here = threading.get_ident() == thread
        return (function if is_here else method)(*args, **kwargs)

    attributes[name] = called
    try:
        yield
    finally:
        del attributes[name]
        if before is not None:
            attributes[name] = before


@contextlib.contextmanager
def _segments(model: Any, count: int) -> Iterator[None]:
    """Runs a model's graph of layers as `count` compiled functions within this context."""
    layers = (getattr(one, "_functional", one) for one in model._flatten_layers())
    graphs: list[Any] = [one for one in layers if isinstance(one, keras.Function)]
    # An inner model with more layers, such as a frozen one, may have no gradients.
    graph: Any = max(graphs, key=_size, default=None)
    has_run = False

    def run(inputs: Any, operation_fn: Any = lambda operation: operation) -> Any:
        nonlocal has_run
        has_run = True
        return _run_in_segments(graph, count, inputs, operation_fn)

    with _replaced(graph, "_run_through_graph", run) if graph else contextlib.nullcontext():
        yield
    if not has_run:
        raise ValueError(
            "Several compiled segments require a Sequential or functional model, or such a model "
            f"as a layer. Received: xla_segments={count} and {type(model).__name__}, which has or "
            "calls none. Pass xla_segments=1."
        )


def _run_in_segments(graph: Any, count: int, inputs: Any, operation_fn: Any) -> Any:
    """Returns the outputs of a graph of layers, whose operations run in compiled functions."""
    values = {id(x): y for x, y in zip(graph.inputs, keras.tree.flatten(inputs), strict=True)}
    for function in _cut(graph, count):
        tensors = [values[id(x)] for x in function.inputs]
        outputs, masks = _segment(function, operation_fn)(tensors, _masks(tensors))
        values |= zip(map(id, function.outputs), _with_masks(outputs, masks), strict=True)
    # Neither losses nor the lists of TensorFlow's loops can leave a compiled function.
    if refused := [one.name for one in graph._flatten_layers() if _is_refused(one)]:
        raise ValueError(
            "Layers of compiled segments must neither add losses nor loop over time. Received: "
            f"xla_segments={count} and layers {refused}. Pass xla_segments=1, or unroll=True "
            "to recurrent layers."
        )
    outputs = [values[id(x)] for x in graph.outputs]
    return keras.tree.pack_sequence_as(graph._outputs_struct, outputs)


def _size(graph: Any) -> tuple[int, int]:
    return len(graph.trainable_weights), len(graph.operations)


def _is_refused(layer: Any) -> bool:
    """Returns whether a layer adds losses other than regularizers, or loops over time."""
    regularized = sum(one.regularizer is not None for one in layer.trainable_variables)
    loops = isinstance(layer, keras.layers.RNN) and not layer.unroll
    return loops or len(layer.losses) > regularized


def _cut(graph: Any, count: int) -> list[Any]:
    """Returns `keras.Function` objects that compute the graph one after another.

    All have about equally many operations. Outputs are the tensors that later functions need.
    """
    by_depth = graph._nodes_by_depth
    ordered = (node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth])
    nodes = [node for node in ordered if not node.is_input]
    if count > len(nodes):
        raise ValueError(
            "`xla_segments` must be at most the number of operations. Received: "
            f"xla_segments={count} and {len(nodes)} operations of {graph.name!r}."
        )
    functions: list[Any] = []
    needed = {id(x) for x in graph.outputs}
    bounds = [len(nodes) * index // count for index in range(count + 1)]
    for begin, end in reversed([*itertools.pairwise(bounds)]):
        part = nodes[begin:end]
        made = {id(x): x for node in part for x in node.outputs}
        used = {id(x): x for node in part for x in node.input_tensors if id(x) not in made}
        outputs = [x for key, x in made.items() if key in needed]
        functions.insert(0, keras.Function([*used.values()], outputs))
        needed |= used.keys()
    return functions


def _segment(function: Any, operation_fn: Any) -> Any:
    """Returns a compiled function of tensors and masks, which runs a `keras.Function`."""

    @tf.function(jit_compile=True, autograph=False)
    def segment(tensors: Sequence[Any], masks: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        # `operation_fn` passes arguments of the call, such as `training`, to each layer. A call of
        # `function` would pass the recorded arguments of layers, such as `training=False`.
        # TensorFlow refuses the outermost scope of a layer whose name begins with "_".
        with tf.name_scope("segment"):
            found = function._run_through_graph(_with_masks(tensors, masks), operation_fn)
        outputs = keras.tree.flatten(found)
        return outputs, _masks(outputs)

    return segment


def _masks(tensors: Sequence[Any]) -> list[Any]:
    """Returns the masks that Keras passes between layers as an attribute of tensors."""
    return [getattr(tensor, "_keras_mask", None) for tensor in tensors]


def _with_masks(tensors: Sequence[Any], masks: Sequence[Any]) -> list[Any]:
    """Sets the masks of tensors, because a `tf.function` does not return these attributes."""
    for tensor, mask in zip(tensors, masks, strict=True):
        if mask is not None:
            tensor._keras_mask = mask
    return list(tensors)
