"""Traces train steps, and finds the collectives for which each collective waits."""

import tensorflow as tf

from tests.helpers import models


def traced(model, optimizer, batch):
    """Returns the graph of the train step as `fit` traces it."""
    model.compile(optimizer=optimizer, loss=models.LOSS)
    x, _ = batch
    step = tf.function(model.train_step, reduce_retracing=True)
    return step.get_concrete_function(
        (tf.TensorSpec([None, *x.shape[1:]], x.dtype), tf.TensorSpec([None], "int64"))
    ).graph


def ancestors(op, graph):
    seen, left = set(), [*op.inputs, *op.control_inputs]
    while left:
        current = left.pop()
        parent = getattr(current, "op", current)
        if parent in seen and not _exchanges_again(parent, graph):
            continue
        seen.add(parent)
        left += _inputs(current, parent, graph)
    return seen


def _inputs(current, parent, graph):
    if not _exchanges_again(parent, graph):
        return [*parent.inputs, *parent.control_inputs]
    # TensorFlow lowers branches, so an output waits for the condition and for its own input to the
    # branch that passes on the earlier result.
    branch = graph._get_function(parent.get_attr("else_branch").name).graph
    above = branch.outputs[current.value_index]
    while above.op.type == "Identity":
        (above,) = above.op.inputs
    place = [tensor.name for tensor in branch.inputs].index(above.name)
    return [parent.inputs[0], parent.inputs[1 + place]]


def _exchanges_again(op, graph):
    if op.type not in ("If", "StatelessIf"):
        return False
    branch = graph._get_function(op.get_attr("then_branch").name).graph
    return any(".again" in inner.name for inner in branch.get_operations())


def bucket_of(op, graph):
    """Returns the bucket that an op exchanges, directly or in a branch."""
    if op.type.startswith("Horovod"):
        # A repeated exchange, after unexpected sample counts, follows all others.
        is_first = "bucket" in op.name and ".again" not in op.name
        return op.name.split(".")[1] if is_first else None
    if op.type not in ("If", "StatelessIf"):
        return None
    branch = graph._get_function(op.get_attr("then_branch").name).graph
    return next(
        (name for inner in branch.get_operations() if (name := bucket_of(inner, branch))), None
    )


def check_independent(graph, buckets):
    bucket = {op: name for op in graph.get_operations() if (name := bucket_of(op, graph))}
    collectives = list(bucket)
    assert len(set(bucket.values())) == buckets > 1, sorted(set(bucket.values()))
    for op in collectives:
        above = {bucket[a] for a in ancestors(op, graph) if a in bucket}
        assert above <= {bucket[op]}, f"{op.name} waits for {above}"
