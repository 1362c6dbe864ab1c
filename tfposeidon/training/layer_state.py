"""State of a model's layers outside of variables.

Preprocessing layers adapt to data before training, usually each rank to its own shard. They hold
the result (statistics, bins, vocabularies) in tensors, lists, tables and files, which
`model.variables` does not include.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfposeidon.communication.wire import Wire, broadcast_bytes, exchange_objects
from tfposeidon.state.placement import Placement, StateEntry, placement_outside_variables
from tfposeidon.training import hooks

State = dict[str, np.ndarray]
"""Arrays by layer index, layer name and quantity, such as `"3.normalization.mean"`."""

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)
# Their state belongs to the lookup layer inside them, which is a layer of the model, too.
_STATELESS = (keras.layers.TextVectorization,)
# Their `finalize_state` would start from the counts of this rank's `adapt` and discard the assigned
# values.
_FINALIZED_FROM_COUNTS = (*_LOOKUPS, *_STATELESS, keras.layers.Discretization)
_TABLES = (
    tf.lookup.StaticHashTable
    | tf.lookup.experimental.MutableHashTable
    | tf.lookup.experimental.DenseHashTable
)


def entries(model: keras.Model) -> list[StateEntry]:
    """Returns the layers with state outside of variables, including those of models inside it."""
    return [
        # Indexed, since several layers may have the same name.
        StateEntry(f"{index}.{layer.name}", layer, placement_outside_variables(layer))
        for index, layer in enumerate(model._flatten_layers())
        if _keeps_state(layer)
    ]


def read(model: keras.Model, *placements: Placement) -> State:
    """Returns the state with one of these placements that layers hold outside of variables."""
    return {
        f"{entry.name}.{name}": value
        for entry in entries(model)
        if entry.placement in placements
        for name, value in _read(entry.value).items()
    }


def assign(model: keras.Model, state: State) -> None:
    """Assigns to the layers a state that `read` returned, possibly in another process."""
    before = read(model, *Placement)
    # Layers that derive values from their variables (`finalize_state`) do so first.
    for index, layer in enumerate(model._flatten_layers()):
        if hasattr(layer, "finalize_state") and not isinstance(layer, _FINALIZED_FROM_COUNTS):
            layer.finalize_state()
        values = dict(_quantities_of_layer(index, state))
        if values and not _equal(_read(layer), values):
            _assign(layer, values)
    # Functions traced before hold the old values as constants and must be traced again.
    if not _equal(read(model, *Placement), before):
        model.test_function = model.predict_function = None
        if model.train_function is not None:
            hooks.retrace(model)


def broadcast(model: keras.Model, wire: Wire, root_rank: int = 0) -> None:
    """Copies one rank's state outside of variables to all; raises on all if `assign` fails."""
    if wire.topology.size == 1:
        return
    packed = (
        _to_bytes(read(model, Placement.REPLICATED)) if wire.topology.rank == root_rank else b""
    )
    received = _from_bytes(broadcast_bytes(packed, wire, root_rank, "tp.layer_state"))
    problem = None
    try:
        assign(model, received)
    except ValueError as error:
        problem = str(error)
    # Every rank must raise: a rank that continued would wait for the others in a collective.
    problems = exchange_objects(problem, wire, "tp.layer_state.assigned")
    for rank, other in enumerate(problems):
        if other:
            raise ValueError(f"{other} (rank {rank})")


def _to_bytes(state: State) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **state)  # type: ignore[arg-type]
    return stream.getvalue()


def _from_bytes(content: bytes) -> State:
    with np.load(io.BytesIO(content)) as archive:
        return {name: archive[name] for name in archive.files}


def _quantities_of_layer(index: int, state: State) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in state.items():
        if key.split(".", 1)[0] == str(index):
            yield key.rsplit(".", 1)[1], value


def _equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def _keeps_state(layer: Any) -> bool:
    if isinstance(layer, _STATELESS):
        return False
    known = (keras.layers.Normalization, keras.layers.Discretization, *_LOOKUPS)
    return isinstance(layer, known) or hasattr(layer, "save_assets") or bool(_tables(layer))


def _read(layer: Any) -> State:
    if isinstance(layer, keras.layers.Normalization):
        # A layer that is not built has no variance.
        values = {name: getattr(layer, name, None) for name in ("mean", "variance")}
        return {
            name: np.asarray(value, "float32")
            for name, value in values.items()
            if value is not None
        }
    if isinstance(layer, keras.layers.Discretization):
        return (
            {}
            if layer.bin_boundaries is None
            else {"bin_boundaries": np.asarray(layer.bin_boundaries, "float64")}
        )
    if isinstance(layer, _LOOKUPS):
        return _read_lookup(layer)
    if hasattr(layer, "save_assets"):
        return _read_files(layer)
    return {name: _pairs(table) for name, table in _tables(layer).items()}


def _assign(layer: Any, values: State) -> None:
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


def _read_lookup(layer: Any) -> State:
    vocabulary = layer.get_vocabulary(include_special_tokens=False)
    if not vocabulary:
        return {}
    # Integers are stored as text, too: NumPy's files cannot hold objects.
    state = {"vocabulary": np.asarray([str(token) for token in vocabulary])}
    weights = getattr(layer, "idf_weights_const", None)
    return state if weights is None else state | {"idf_weights": np.asarray(weights)}


def _assign_lookup(layer: Any, values: State) -> None:
    to_token = int if isinstance(layer, keras.layers.IntegerLookup) else str
    tokens = [to_token(token) for token in values["vocabulary"]]
    if "idf_weights" not in values:
        layer.set_vocabulary(tokens)
        return
    # Keras accepts the weights of regular tokens only, and computes those of special tokens
    # (unknown ones) from them. The saved weights of all tokens are assigned afterwards.
    begin = layer.vocabulary_size() - len(layer.get_vocabulary(include_special_tokens=False))
    layer.set_vocabulary(tokens, idf_weights=values["idf_weights"][begin : begin + len(tokens)])
    layer.load_own_variables({"idf_weights": values["idf_weights"]})


def _read_files(layer: Any) -> State:
    with tempfile.TemporaryDirectory() as folder:
        layer.save_assets(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        names = np.asarray([str(path.relative_to(folder)) for path in files], dtype=str)
        sizes = np.asarray([path.stat().st_size for path in files], "int64")
        content = np.frombuffer(b"".join(path.read_bytes() for path in files), "uint8")
    return {"files": names, "sizes": sizes, "content": content}


def _assign_files(layer: Any, values: State) -> None:
    with tempfile.TemporaryDirectory() as folder:
        start = 0
        for name, size in zip(values["files"], values["sizes"], strict=True):
            path = Path(folder) / str(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(values["content"][start : start + size].tobytes())
            start += int(size)
        layer.load_assets(folder)


def _tables(layer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if isinstance(value, _TABLES)}


def _pairs(table: Any) -> np.ndarray:
    keys, values = table.export()
    return np.asarray(
        sorted(f"{key}: {value}" for key, value in zip(keys.numpy(), values.numpy(), strict=True))
    )
