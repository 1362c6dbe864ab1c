"""Compiles the gradients of Keras's own train step with XLA, and not their exchange.

XLA can compile neither collectives nor top-k selection. A step that is compiled as one function
returns all gradients at its end, so that its communication is exposed. Therefore the graph of a
traced step can be cut into several functions, each of which returns the gradients that it computes.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

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

    def train_step(data: Any) -> dict[str, Any]:
        def gradients(*inputs: Any) -> tuple[list[list[Any]], dict[str, Any]]:
            found: list[list[Any]] = []
            values = iter(inputs)
            packed = tf.nest.map_structure(
                lambda x: next(values) if tf.is_tensor(x) else x, data, expand_composites=True
            )
            with _replaced(model.optimizer, "apply", lambda grads, *_: found.append(list(grads))):
                logs = step(packed)
            return found, logs

        # Make a new function for each trace, because a step may be traced again after its first
        # trace has created variables.
        function = tf.function(gradients, jit_compile=True, autograph=False)
        tensors = [x for x in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(x)]
        found, logs = (
            function(*tensors) if functions == 1 else _run_parts(function, functions, tensors)
        )
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


def _run_parts(function: Any, count: int, tensors: Sequence[Any]) -> Any:
    """Returns the outputs of a function, whose graph runs as `count` compiled functions."""
    whole = function.get_concrete_function(*tensors)
    # The functions of loops and branches exist only as long as `whole`.
    tf.compat.v1.add_to_collection("tfposeidon_compiled", whole)
    # TensorFlow appends a copy of each output to the graph.
    results = tf.nest.map_structure(
        lambda x: x if x is None else x.op.inputs[0],
        whole.structured_outputs,
        expand_composites=True,
    )
    wanted = {x.name for x in tf.nest.flatten(results, expand_composites=True) if x is not None}
    everything = [one for one in whole.graph.get_operations() if one.type != "Placeholder"]
    repeated = _repeated(everything, wanted)
    operations = [one for one in everything if one.name not in repeated]
    names = [x.name for x in whole.inputs]
    values = dict(zip(names, [*tensors, *whole.captured_inputs], strict=True))
    definition = whole.graph.as_graph_def()
    for begin, end in itertools.pairwise(_bounds(operations, results[0], count)):
        part = operations[begin:end]
        later = wanted | {x.name for one in operations[end:] for x in one.inputs}
        outputs = [x for one in part for x in one.outputs if x.name in later]
        used = {x.op.name for one in part for x in one.inputs}
        part += [one for one in everything if one.name in used & repeated]
        values |= _run_part(definition, part, values, outputs)
    return tf.nest.map_structure(
        lambda x: x if x is None else values[x.name], results, expand_composites=True
    )


def _repeated(operations: Sequence[Any], wanted: Collection[str]) -> set[str]:
    """Returns names of constants and of reads of unchanged variables, which each part repeats."""
    inputs = [(one, x) for one in operations for x in one.inputs if x.dtype == tf.resource]
    changed = {x.name for one, x in inputs if one.type != "ReadVariableOp"}
    reads = {one.name for one, x in inputs if x.name not in changed}
    constants = {one.name for one in operations if one.type == "Const"}
    return (reads | constants) - {name.partition(":")[0] for name in wanted}


def _bounds(operations: Sequence[Any], gradients: Any, count: int) -> list[int]:
    """Returns where to cut operations into parts that compute about equally many gradients."""
    index = {one.name: position for position, one in enumerate(operations)}
    found = [one for one in tf.nest.flatten(gradients) if one is not None]
    parts = [tf.nest.flatten(one, expand_composites=True) for one in found]
    ends = {1 + max(index.get(x.op.name, -1) for x in part) for part in parts} - {0}
    # A compiled function cannot return the lists in which loops store what their gradients need.
    lists = [
        (index.get(x.op.name, -1), index[one.name])
        for one in operations
        for x in one.inputs
        if x.dtype == tf.variant
    ]
    allowed = sorted(end for end in ends if not any(made < end <= used for made, used in lists))
    if count > len(allowed):
        raise ValueError(
            "`xla_segments` must be at most the number of gradients that XLA can return one after "
            f"another. Received: xla_segments={count} and {len(allowed)} such gradients. Pass "
            "xla_segments=1."
        )
    inner = [allowed[len(allowed) * part // count - 1] for part in range(1, count)]
    return [0, *inner, len(operations)]


def _run_part(
    whole: Any, operations: Sequence[Any], values: dict[str, Any], outputs: Sequence[Any]
) -> dict[str, Any]:
    """Returns outputs of operations by name, which one compiled function computes from values."""
    names = {one.name for one in operations}
    part = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
    part.node.extend(node for node in whole.node if node.name in names)
    for node in part.node:
        # Functions that use the same variables run in order, without control inputs of other parts.
        node.input[:] = [x for x in node.input if not x.startswith("^") or x[1:] in names]
        # These name operations of other parts.
        node.attr.pop("_class", None)
    used = [x.name for one in operations for x in one.inputs if x.op.name not in names]
    inputs = {name: values[name] for name in used}

    @tf.function(jit_compile=True, autograph=False)
    def segment(*tensors: Any) -> list[Any]:
        named = dict(zip(inputs, tensors, strict=True))
        return tf.graph_util.import_graph_def(part, named, [x.name for x in outputs], name="")

    found = {x.name: y for x, y in zip(outputs, segment(*inputs.values()), strict=True)}
    for x in outputs:
        found[x.name].set_shape(x.shape)
    return found
