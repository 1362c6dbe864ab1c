"""Merged embedding rows for Keras's optimizers contain no index twice."""

import numpy as np
import pytest
import tensorflow as tf

from tfposeidon.gradients import merge_rows


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("count", [0, 1, 500])
def test_rows_merge_equally_with_and_without_xla(count, dtype):
    indices = np.random.default_rng(0).integers(0, 40, count).astype(dtype)
    values = np.random.default_rng(1).integers(-9, 9, (count, 3)).astype("float32")
    expected = np.zeros((40, 3), "float32")
    np.add.at(expected, indices, values)
    for xla in (False, True):

        @tf.function(jit_compile=xla)
        def merged(indices, values):
            rows = merge_rows(tf.IndexedSlices(values, indices, (40, 3)))
            return rows.indices, rows.values

        found, sums = (part.numpy() for part in merged(indices, values))
        total = np.zeros_like(expected)
        np.add.at(total, found, sums)
        np.testing.assert_array_equal(total, expected)
        # An index may occur again only with zeros, which do not move a row twice.
        moved = found[np.any(sums, axis=1)]
        assert len(set(moved)) == len(moved)
