"""Lists all state of a model, its optimizers and its callbacks, with the `Placement` of each entry.

Checkpoints, broadcasts and comparisons read this one list, so that they cover the same state.

Layers also hold state outside of variables: preprocessing layers adapt to data before training,
usually on each rank to the rank's shard. The result (statistics, bins, vocabularies) is in tensors,
lists, tables and files, which `model.variables` does not include.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfposeidon.communication import runtime
from tfposeidon.communication.wire import Wire, broadcast_bytes, exchange_objects
from tfposeidon.exchange import replicas
from tfposeidon.exchange.replicas import check_same_variables, variables_as_json
from tfposeidon.gradients import of_tensorflow
from tfposeidon.state.placement import (
    Placement,
    StateDescription,
    another_seed,
    by_dtype,
    placed,
    placement_outside_variables,
    placements_of_layers,
    seeds_of_layers,
)
from tfposeidon.training import session

LayerState = dict[str, np.ndarray]
"""Arrays by layer index, layer name and quantity, such as `"3.normalization.mean"`."""

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)
# `finalize_state` of these layers would overwrite assigned values with the results of `adapt`.
_FINALIZED_FROM_COUNTS = (*_LOOKUPS, keras.layers.TextVectorization, keras.layers.Discretization)
_TABLES = (
    tf.lookup.StaticHashTable
    | tf.lookup.experimental.MutableHashTable
    | tf.lookup.experimental.DenseHashTable
)


def held_optimizers(model: Any) -> list[Any]:
    """Returns communicating optimizers, or their loss scales; `model.optimizer` if none exist."""
    own = getattr(model, "optimizer", None)
    return session.held_by(model) or ([] if own is None else [own])


def optimizers(model: Any) -> list[Any]:
    """Returns `held_optimizers`, with loss scales around communicating optimizers removed."""
    return [session.without_loss_scale(held) for held in held_optimizers(model)]


def _has_own_inner(optimizer: Any) -> bool:
    # Keras's own optimizers do not have this attribute. Their state is replicated.
    return getattr(optimizer, "has_own_inner", False)


def _own_scale(held: Any) -> list[Any]:
    """Returns the variables of a loss scale whose values may differ between ranks."""
    optimizer = session.without_loss_scale(held)
    if held is optimizer or not _has_own_inner(optimizer):
        return []
    equal = set(map(id, optimizer.variables))
    return [variable for variable in held.variables if id(variable) not in equal]


def _own_inner(held: Any) -> list[Any]:
    """Returns the inner optimizer's and loss scale's variables that may differ between ranks."""
    optimizer = session.without_loss_scale(held)
    if not (_has_own_inner(optimizer) and optimizer.built):
        return []
    return [*optimizer.inner_optimizer.variables, *_own_scale(held)]


def of_train_step(model: Any) -> list[Any]:
    """Returns replicated variables that optimizers neither update nor use as their state."""
    updated: list[Any] = []
    for held in held_optimizers(model):
        optimizer = session.without_loss_scale(held)
        updated += [*held.variables, *optimizer.variables]
        updated += itertools.chain(*optimizer.exchange.plans.lists)
    known = {of_tensorflow(variable).ref() for variable in updated}
    return [v for v in replicated_variables(model) if of_tensorflow(v).ref() not in known]


def variables_of(model: Any, *placements: Placement) -> list[Any]:
    """Returns variables with these placements, without `parts`, in the same order on all ranks."""
    replicated = list(model.trainable_variables)
    for held in held_optimizers(model):
        optimizer = session.without_loss_scale(held)
        replicated += (optimizer if _has_own_inner(optimizer) else held).variables
    callbacks = session.of(model).callbacks_with_state.values()
    pairs = [
        *((variable, Placement.REPLICATED) for variable in replicated),
        *placements_of_layers(model),
        *placed(pair for callback in callbacks for pair in callback.state()),
    ]
    return [variable for variable, placement in pairs if placement in placements]


def statistics_of(model: Any, optimizer: Any) -> list[Any]:
    """Returns the averaged state that an optimizer synchronizes together with its weights."""
    # Only the first of several optimizers averages this state, which must be averaged only once.
    found = [one for one in session.optimizers_of(model) if not one.fit_hooks(model).is_in_step]
    return variables_of(model, Placement.AVERAGED) if found[:1] == [optimizer] else []


def parts(model: Any) -> Iterator[tuple[Any, StateDescription]]:
    """Yields optimizer state that differs between ranks; collective if an optimizer has no plan."""
    for number, held in enumerate(held_optimizers(model)):
        optimizer = session.without_loss_scale(held)
        # Keras's own optimizers have no such state.
        found = list(getattr(optimizer, "rank_state", ()))
        found += [
            (v, StateDescription(name=f"loss scale {index}", placement=by_dtype(v)))
            for index, v in enumerate(_own_scale(held))
        ]
        for variable, part in found:
            name = f"{part.name} of optimizer {number}" if number else part.name
            yield variable, dataclasses.replace(part, name=name)


def replicated_variables(model: keras.Model) -> list[Any]:
    """Returns replicated variables; raises `RuntimeError` if the model has no weights.

    If the model has only one optimizer, this function builds it.
    """
    if not has_weights(model):
        raise RuntimeError(
            "This callback requires the model's weights when training begins. Received: a model "
            "that is not built, and data of unknown shape. Call the model on one batch, or "
            "model.build(input_shape), before fit."
        )
    found = held_optimizers(model)
    # With several optimizers, the variables of each one are known only in the first step.
    if found == [getattr(model, "optimizer", None)] and not found[0].built:
        model.optimizer.build(model.trainable_variables)
    return variables_of(model, Placement.REPLICATED)


def has_weights(model: keras.Model) -> bool:
    """Returns whether the weights that steps train exist."""
    # Models without a `call` of their own, such as GANs, are never built, although their layers
    # are. A layer that inherits Keras's trainer without being a model has no `layers`.
    layers = getattr(model, "layers", ())
    is_built = model.built or (bool(layers) and all(layer.built for layer in layers))
    # Layers that no step calls are never built, but a step has built the optimizers.
    return is_built or any(optimizer.built for optimizer in optimizers(model))


def broadcast_state(
    model: keras.Model, wire: Wire, root_rank: int = 0, with_own_inner: bool = False
) -> None:
    """Copies one rank's state to all ranks; collective.

    `with_own_inner` includes state of inner optimizers that may differ between ranks.
    """
    own_inner = [v for held in held_optimizers(model) if with_own_inner for v in _own_inner(held)]
    variables = [
        *replicated_variables(model),
        *variables_of(model, Placement.AVERAGED),
        *seeds_of_layers(model),
        *own_inner,
    ]
    replicas.broadcast(variables, wire, root_rank)
    if wire.topology.rank != root_rank:
        # Clear these variables, because the sum over ranks must be the root's value.
        replicas.clear(variables_of(model, Placement.PARTIAL))
    broadcast_layers(model, wire, root_rank)
    for optimizer in optimizers(model):
        # Only optimizers with sharded state have this method.
        if hasattr(optimizer, "scatter_state"):
            optimizer.scatter_state(root_rank)


def synchronize_start(model: keras.Model, wire: Wire, root_rank: int = 0) -> None:
    """Assigns one rank's values on all ranks, but a different seed on each; collective."""
    # A snapshot within an epoch contains each rank's own statistics, so do not compare them.
    placements = [] if session.of(model).is_resumed else [Placement.AVERAGED]
    problem = difference(model, wire, True, *placements)
    if problem:
        broadcast_state(model, wire, root_rank)
        runtime.log_once(
            "tfposeidon: %s All ranks start with the values of rank %d.", problem, root_rank
        )
    seeds = seeds_of_layers(model)
    states = exchange_objects([v.numpy().tolist() for v in seeds], wire, "tp.seeds")
    rank = wire.topology.rank
    for variable, own, *lower in zip(seeds, states[rank], *states[:rank], strict=False):
        if own in lower:
            variable.assign(another_seed(tf.convert_to_tensor(variable), rank))


def difference(
    model: keras.Model, wire: Wire, with_layers: bool = False, *placements: Placement
) -> str | None:
    """Returns a message about the first value that differs between ranks, or `None`; collective.

    Ranks compare one checksum over all variables that are replicated or have one of `placements`.
    `with_layers` includes state outside of variables. All ranks return the same message, or raise
    an error if they have different variables.
    """
    variables = replicated_variables(model) if has_weights(model) else []
    variables += variables_of(model, *placements)
    layers = read_layers(model, Placement.REPLICATED) if with_layers else {}
    own = replicas.checksum([*variables, *layers.values()])
    received = exchange_objects(own, wire, "tp.equal")
    # All ranks join the search below, because they have received the same checksums.
    if all(other == received[0] for other in received):
        return None
    described = variables_as_json(replicas.describe_any(variables))
    check_same_variables(exchange_objects(described, wire, "tp.equal.variables"))
    found = replicas.differences(variables, layers, wire)
    if not found:
        # The checksum of a rank without a GPU may differ although its values are equal.
        return None
    path, ranks = next(iter(found.items()))
    return (
        "All ranks must hold the same weights, optimizer state and state of layers. Received: "
        f"{path!r}, which differs on rank(s) {ranks} from rank 0, the first of {len(found)} "
        f"differences in {len(variables) + len(layers)} values."
    )


# ------------------------------------------------------------------ state outside of variables


def read_layers(model: keras.Model, *placements: Placement) -> LayerState:
    """Returns layer state that is outside of variables and has one of these placements."""
    return {
        # Include the index, because several layers may have the same name.
        f"{index}.{layer.name}.{name}": value
        for index, layer in enumerate(model._flatten_layers())
        # The model's layers include the lookup layer inside `TextVectorization`, with its state.
        if not isinstance(layer, keras.layers.TextVectorization)
        and placement_outside_variables(layer) in placements
        for name, value in _read(layer).items()
    }


def assign_layers(model: keras.Model, state: LayerState) -> None:
    """Assigns state from `read_layers`, possibly of another process, to the layers."""
    before = read_layers(model, *Placement)
    # Call `finalize_state` first, because it overwrites values that a layer derives from variables.
    for index, layer in enumerate(model._flatten_layers()):
        if hasattr(layer, "finalize_state") and not isinstance(layer, _FINALIZED_FROM_COUNTS):
            layer.finalize_state()
        values = {
            key.rsplit(".", 1)[1]: value
            for key, value in state.items()
            if key.split(".", 1)[0] == str(index)
        }
        if values and not _equal(_read(layer), values):
            _assign(layer, values)
    # Traced functions contain the old values as constants and must be traced again.
    if not _equal(read_layers(model, *Placement), before):
        model.test_function = model.predict_function = None
        if model.train_function is not None:
            session.of(model).retrace()


def broadcast_layers(model: keras.Model, wire: Wire, root_rank: int = 0) -> None:
    """Copies one rank's layer state outside of variables to all; if one rank fails, all raise."""
    if wire.topology.size == 1:
        return
    stream = io.BytesIO()
    if wire.topology.rank == root_rank:
        np.savez(stream, **read_layers(model, Placement.REPLICATED))  # type: ignore[arg-type]
    content = broadcast_bytes(stream.getvalue(), wire, root_rank, "tp.layer_state")
    with np.load(io.BytesIO(content)) as archive:
        received = dict(archive)
    problem = cause = None
    try:
        assign_layers(model, received)
    except Exception as error:  # noqa: BLE001, because the code of a layer may raise any error.
        problem, cause = str(error) or type(error).__name__, error
    # All ranks must raise: a rank that continued would wait for the others in a collective.
    problems = exchange_objects(problem, wire, "tp.layer_state.assigned")
    for rank, other in enumerate(problems):
        if other:
            raise ValueError(f"Rank {rank} cannot assign the state of layers. {other}") from cause


def _equal(a: LayerState, b: LayerState) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def _read(layer: Any) -> LayerState:
    if isinstance(layer, keras.layers.Normalization):
        # A layer that is not built has no variance.
        found = {name: getattr(layer, name, None) for name in ("mean", "variance")}
        return {k: np.asarray(v, "float32") for k, v in found.items() if v is not None}
    if isinstance(layer, keras.layers.Discretization):
        bins = layer.bin_boundaries
        return {} if bins is None else {"bin_boundaries": np.asarray(bins, "float64")}
    if isinstance(layer, _LOOKUPS):
        return _read_lookup(layer)
    if hasattr(layer, "save_assets"):
        return _read_files(layer)
    return {name: _pairs(v) for name, v in vars(layer).items() if isinstance(v, _TABLES)}


def _assign(layer: Any, values: LayerState) -> None:
    if isinstance(layer, keras.layers.Normalization):
        for name, value in values.items():
            setattr(layer, name, tf.cast(value, layer.compute_dtype))
    elif isinstance(layer, keras.layers.Discretization):
        layer.bin_boundaries = values["bin_boundaries"].tolist()
    elif isinstance(layer, _LOOKUPS):
        _assign_lookup(layer, values)
    elif hasattr(layer, "load_assets"):
        _assign_files(layer, values)
    else:
        raise ValueError(
            "Lookup tables of layers must be equal on all ranks, or the layer must implement "
            f"save_assets and load_assets. Received: layer {layer.name!r}, whose "
            f"{', '.join(sorted(values))} differ. Initialize them with the same values, or "
            "implement these methods."
        )


def _read_lookup(layer: Any) -> LayerState:
    vocabulary = layer.get_vocabulary(include_special_tokens=False)
    if not vocabulary:
        return {}
    # Store integer tokens as text, too, because arrays in NumPy's files must not contain objects.
    state = {"vocabulary": np.asarray([str(token) for token in vocabulary])}
    weights = getattr(layer, "idf_weights_const", None)
    return state if weights is None else state | {"idf_weights": np.asarray(weights)}


def _assign_lookup(layer: Any, values: LayerState) -> None:
    to_token = int if isinstance(layer, keras.layers.IntegerLookup) else str
    tokens = [to_token(token) for token in values["vocabulary"]]
    if "idf_weights" not in values:
        layer.set_vocabulary(tokens)
        return
    # `set_vocabulary` accepts only the weights of regular tokens, and computes the weights of
    # special tokens from them. So assign the saved weights of all tokens afterwards.
    begin = layer.vocabulary_size() - len(layer.get_vocabulary(include_special_tokens=False))
    layer.set_vocabulary(tokens, idf_weights=values["idf_weights"][begin : begin + len(tokens)])
    layer.load_own_variables({"idf_weights": values["idf_weights"]})


def _read_files(layer: Any) -> LayerState:
    with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        names = np.asarray([str(path.relative_to(folder)) for path in files], dtype=str)
        sizes = np.asarray([path.stat().st_size for path in files], "int64")
        content = np.frombuffer(b"".join(path.read_bytes() for path in files), "uint8")
    return {"files": names, "sizes": sizes, "content": content}


def _assign_files(layer: Any, values: LayerState) -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = 0
        for name, size in zip(values["files"], values["sizes"], strict=True):
            path = Path(folder) / str(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(values["content"][start : start + size].tobytes())
            start += int(size)
        layer.load_assets(folder)


def _pairs(table: Any) -> np.ndarray:
    keys, values = table.export()
    return np.asarray(
        sorted(f"{key}: {value}" for key, value in zip(keys.numpy(), values.numpy(), strict=True))
    )
