"""Compiles the gradients of Keras's own train step with XLA, and leaves the exchange outside.

XLA can compile neither collectives nor top-k selection. A step that is compiled as one function has
all gradients at its end, so that its communication is exposed. Several functions, each for a part
of the layers, return the gradients of their part when its backward pass ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfposeidon.training import session

_AUTO = "_tfposeidon_has_auto_xla"


def noting_auto(resolve: Any) -> Any:
    """Wraps Keras's method for `jit_compile="auto"`, to record when `compile` calls it."""

    @functools.wraps(resolve)
    def method(model: Any) -> Any:
        # The first assignment to `model.jit_compile` also calls this method, whatever the value.
        if sys._getframe(1).f_code.co_name == "compile":
            setattr(model, _AUTO, True)
        return resolve(model)

    return method


def noting_user(compile_: Any) -> Any:
    """Wraps `compile`, to discard such a record of an earlier call."""

    @functools.wraps(compile_)
    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(model, _AUTO, False)
        return compile_(model, *args, **kwargs)

    return method


def requested_functions(model: Any, is_optional: bool) -> int:
    """Returns how many functions of the train step XLA compiles; 0 to build the step without XLA.

    With `is_optional`, an optimizer has to request them, because Keras can compile the whole step.
    """
    wanted = max(getattr(one, "xla_segments", None) or 0 for one in session.optimizers_of(model))
    is_users = not is_optional and model.jit_compile and not getattr(model, _AUTO, False)
    if not wanted and not is_users:
        return 0
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
    if model.run_eagerly or unsupported:
        found = "run_eagerly=True" if model.run_eagerly else f"layers {unsupported}"
        raise ValueError(
            "XLA compiles only traced steps of layers that support it. Received: "
            f"{received} and {found}. {remedy}"
        )
    return wanted or 1


def compiled(
    model: Any, step: Callable[[Any], Any], functions: int
) -> Callable[[Any], dict[str, Any]]:
    """Returns a train step that computes the gradients of `step` in compiled functions."""

    def gradients(data: Any) -> tuple[list[Any], dict[str, Any]]:
        with _intercepted_updates(model.optimizer) as found:
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
def _intercepted_updates(optimizer: Any) -> Iterator[list[Any]]:
    """Collects the gradients of calls of `apply` within this context, and updates nothing."""
    found: list[Any] = []
    vars(optimizer)["apply"] = lambda grads, *_: found.append(list(grads))
    try:
        yield found
    finally:
        del vars(optimizer)["apply"]


@contextlib.contextmanager
def _segments(model: Any, count: int) -> Iterator[None]:
    """Runs the largest graph of layers in a model as `count` functions within this context."""
    layers = (getattr(one, "_functional", one) for one in model._flatten_layers())
    graphs: list[Any] = [one for one in layers if isinstance(one, keras.Function)]
    graph: Any = max(graphs, key=lambda one: len(one.operations), default=None)
    has_run = False

    def run(inputs: Any, *_: Any, **__: Any) -> Any:
        nonlocal has_run
        has_run = True
        values = {id(x): y for x, y in zip(graph.inputs, keras.tree.flatten(inputs), strict=True)}
        for function in _cut(graph, count):
            tensors = [values[id(x)] for x in function.inputs]
            masks = [getattr(tensor, "_keras_mask", None) for tensor in tensors]
            outputs, masks = _segment(function)(tensors, masks)
            values |= zip(map(id, function.outputs), _with_masks(outputs, masks), strict=True)
        # Neither losses nor the lists of TensorFlow's loops can leave a compiled function.
        if refused := [one.name for one in graph._flatten_layers() if one._losses or _loops(one)]:
            raise ValueError(
                "Layers of compiled segments must neither add losses nor loop over time. Received: "
                f"xla_segments={count} and layers {refused}. Pass xla_segments=1, or unroll=True "
                "to recurrent layers."
            )
        outputs = [values[id(x)] for x in graph.outputs]
        return keras.tree.pack_sequence_as(graph._outputs_struct, outputs)

    if graph is not None:
        vars(graph)["_run_through_graph"] = run
    try:
        yield
    finally:
        if graph is not None:
            del vars(graph)["_run_through_graph"]
    if not has_run:
        raise ValueError(
            "Several compiled segments require a Sequential or functional model, or such a model "
            f"as a layer. Received: xla_segments={count} and {type(model).__name__}, which has or "
            "calls none. Pass xla_segments=1."
        )


def _loops(layer: Any) -> bool:
    return isinstance(layer, keras.layers.RNN) and not layer.unroll


def _cut(graph: Any, count: int) -> list[Any]:
    """Returns `keras.Function` objects that compute the graph one after another.

    Each has about equally many operations. Its outputs are the tensors that later ones need.
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


def _segment(function: Any) -> Any:
    """Returns a compiled function of tensors and masks, for a `keras.Function`."""

    @tf.function(jit_compile=True, autograph=False)
    def segment(tensors: Sequence[Any], masks: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outputs = keras.tree.flatten(function(_with_masks(tensors, masks)))
        return outputs, [getattr(tensor, "_keras_mask", None) for tensor in outputs]

    return segment


def _with_masks(tensors: Sequence[Any], masks: Sequence[Any]) -> list[Any]:
    # Keras passes masks between layers as an attribute, which functions do not return.
    for tensor, mask in zip(tensors, masks, strict=True):
        if mask is not None:
            tensor._keras_mask = mask
    return list(tensors)
