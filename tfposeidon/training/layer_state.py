"""State of a model's layers that no variable holds.

Preprocessing layers adapt to data before training, mostly each rank to its own share. What they
learn (statistics, bins, vocabularies) stands in tensors, lists, tables and files, and is not among
`model.variables`.
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
from tfposeidon.training import session

State = dict[str, np.ndarray]
"""Arrays by index and name of the layer and name of the quantity: `"3.normalization.mean"`."""

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)
# Their state is that of the lookup layer inside them, which is a layer of the model, too.
_STATELESS = (keras.layers.TextVectorization,)
# Their `finalize_state` would begin with what this rank has counted in `adapt`, and drop what was
# assigned.
_FINALIZED_FROM_COUNTS = (*_LOOKUPS, *_STATELESS, keras.layers.Discretization)
_TABLES = (
    tf.lookup.StaticHashTable
    | tf.lookup.experimental.MutableHashTable
    | tf.lookup.experimental.DenseHashTable
)


def entries(model: keras.Model) -> list[StateEntry]:
    """Returns the layers of a model, and of models inside it, that keep state elsewhere."""
    return [
        # By index, for several layers may have one name.
        StateEntry(f"{index}.{layer.name}", layer, placement_outside_variables(layer))
        for index, layer in enumerate(model._flatten_layers())
        if _keeps_state(layer)
    ]


def read(model: keras.Model, *placements: Placement) -> State:
    """Returns the state with one of these placements that layers hold outside of variables.

    Args:
      model: A Keras model; layers and models inside it are read, too.
      placements: Placements of the layers to read.
    """
    return {
        f"{entry.name}.{name}": value
        for entry in entries(model)
        if entry.placement in placements
        for name, value in _read(entry.value).items()
    }


def assign(model: keras.Model, state: State) -> None:
    """Assigns to the layers a state that `read` returned, here or in another process.

    Layers that compute something from their variables once these are set (`finalize_state`) do so
    first. If anything changes, the model's functions are traced anew, because those that were
    traced before hold the old values.

    Args:
      model: A Keras model of the same layers as the one that was read.
      state: State that `read` returned.

    Raises:
      ValueError: If something differs that can be read but not assigned.
    """
    before = read(model, *Placement)
    for index, layer in enumerate(model._flatten_layers()):
        if hasattr(layer, "finalize_state") and not isinstance(layer, _FINALIZED_FROM_COUNTS):
            layer.finalize_state()
        values = dict(_quantities_of_layer(index, state))
        if values and not _equal(_read(layer), values):
            _assign(layer, values)
    if not _equal(read(model, *Placement), before):
        model.test_function = model.predict_function = None
        if model.train_function is not None:
            session.of(model).retrace()


def broadcast(model: keras.Model, wire: Wire, root_rank: int = 0) -> None:
    """Gives every rank the state that the layers of one rank hold outside of variables.

    All ranks call it together.

    Args:
      model: A Keras model, of the same layers on every rank.
      wire: Collectives that join the ranks.
      root_rank: Rank whose state all others receive.

    Raises:
      ValueError: On all ranks, if `assign` raises on any.
    """
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
    # Every rank must raise: one that went on alone would wait for the others.
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
            "Tables in layers must be alike on all ranks, or be saved by the layer's save_assets "
            f"and load_assets. Received: layer {layer.name!r}, whose {', '.join(sorted(values))} "
            "differ. Fill them alike, or write these methods."
        )


def _read_lookup(layer: Any) -> State:
    vocabulary = layer.get_vocabulary(include_special_tokens=False)
    if not vocabulary:
        return {}
    # Integers become text, too: NumPy's files hold no objects.
    state = {"vocabulary": np.asarray([str(token) for token in vocabulary])}
    weights = getattr(layer, "idf_weights_const", None)
    return state if weights is None else state | {"idf_weights": np.asarray(weights)}


def _assign_lookup(layer: Any, values: State) -> None:
    to_token = int if isinstance(layer, keras.layers.IntegerLookup) else str
    tokens = [to_token(token) for token in values["vocabulary"]]
    if "idf_weights" not in values:
        layer.set_vocabulary(tokens)
        return
    # Keras takes the weights of the tokens alone, and computes those of special tokens (unknown
    # ones) from them. Then all weights are assigned, as they were saved.
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
