"""Shards training data over ranks, for each kind of data that `fit` accepts.

Think of a share as the slice `data[rank::size]`: of batches if the data are batched, else of
samples. `pipelines` finds the position of that slice in a `tf.data.Dataset`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from tfposeidon.communication import runtime
from tfposeidon.inputs import pipelines


def shard(data: Any, *, rank: int | None = None, size: int | None = None) -> Any:
    """Returns this rank's share of the data: each sample is in the share of exactly one rank.

    Call it on every rank with the same data, in the same order. Shares differ by at most one
    sample, or by one batch if `data` yields batches. If some ranks have one batch more than others,
    the others take part in this step without samples. Pass the batch size of one rank to `fit`.

    A `tf.data.Dataset` is sharded before its first shuffle, `batch` or `repeat`. If its source is a
    list of files, at least one for each rank, each rank reads every `size`-th file, and shares
    differ by the sizes of files. Otherwise each rank takes every `size`-th sample, and also runs
    `filter`, `interleave` and similar steps for the samples of the other ranks.

    Args:
      data: An array; a dictionary, tuple or list of arrays with the same first axis, where `None`
        stays `None`; a pandas frame or series; a `keras.utils.PyDataset`, which is sharded by
        batches and must not reorder its samples differently on each rank; an iterator, such as a
        generator, which is sharded by items; or a `tf.data.Dataset`.
      rank: Index of the share, from 0; by default this rank's index among the ranks that train.
      size: Number of shares; by default the number of ranks that train.

    Returns:
      Data of the same kind: views of NumPy arrays, slices of tensors and frames, and for other data
      objects that read the share lazily. The server of `init(server_rank=...)` receives `data`
      itself, and does not train with it.

    Raises:
      TypeError: If `data` is of another kind.
      ValueError: If arrays differ in their first axis, if a `tf.data.Dataset` is already sharded or
        has no step with equal order on all ranks, or if only one of `rank` and `size` is given.

    Example:
      >>> import numpy as np, tfposeidon as tp
      >>> x, y = tp.shard((np.arange(5), np.arange(5) * 10), rank=1, size=2)
      >>> x, y
      (array([1, 3]), array([10, 30]))
    """
    if rank is None and size is None:
        workers = runtime.workers()
        if runtime.rank() not in workers.ranks:
            return data
        rank, size = workers.index(runtime.rank()), workers.size
    if rank is None or size is None or not 0 <= rank < size:
        raise ValueError(
            "`rank` and `size` must be given together, with 0 <= rank < size. Received: "
            f"rank={rank}, size={size}. Leave both out for this rank of the job."
        )
    if isinstance(data, tf.data.Dataset):
        return data if size == 1 else pipelines.share_of(data, rank, size)
    if isinstance(data, keras.utils.PyDataset):
        return _ShareOfBatches(data, rank, size)
    if isinstance(data, Iterator):
        # Return a generator, because `fit` accepts no other iterators.
        return (item for item in itertools.islice(data, rank, None, size))
    return _rows(data, slice(rank, None, size))


def is_array(leaf: Any) -> bool:
    """Returns whether a value has rows, like arrays, tensors and pandas frames."""
    shape = getattr(leaf, "shape", None)
    return shape is not None and len(shape) > 0 and hasattr(leaf, "__getitem__")


def _rows(data: Any, rows: slice) -> Any:
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    for leaf in leaves:
        if not is_array(leaf):
            raise TypeError(
                "`data` must be an array, a dictionary, tuple or list of arrays, a pandas frame, a "
                "PyDataset, an iterator or a tf.data.Dataset. Received: "
                f"{type(leaf).__name__}. Convert numbers to an array with numpy.asarray."
            )
    lengths = [leaf.shape[0] for leaf in leaves]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"Arrays must have the same first axis. Received: lengths {lengths}. Pass arrays of "
            "the same samples together, and others in a separate call."
        )

    def share(leaf: Any) -> Any:
        return None if leaf is None else getattr(leaf, "iloc", leaf)[rows]

    return keras.tree.map_structure(share, data)


class _ShareOfBatches(keras.utils.PyDataset):
    """`PyDataset` with every `size`-th batch of another `PyDataset`, and its worker settings."""

    def __init__(self, data: keras.utils.PyDataset, rank: int, size: int) -> None:
        super().__init__(data.workers, data.use_multiprocessing, data.max_queue_size)
        self._data, self._rank, self._size = data, rank, size

    @property
    @override
    def num_batches(self) -> int | None:
        number = self._data.num_batches
        return None if number is None else len(range(self._rank, number, self._size))

    def __len__(self) -> int:
        number = self.num_batches
        if number is None:
            raise TypeError(
                "`len` requires a PyDataset of finite length. Received: num_batches=None. Read "
                "`num_batches` instead of `len`."
            )
        return number

    @override
    def __getitem__(self, index: int) -> Any:
        return self._data[self._rank + index * self._size]

    @override
    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    @override
    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()
