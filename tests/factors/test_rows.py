"""The product of embedding rows is the gradient, and repeated tokens are sent once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfposeidon.communication.topology import Topology
from tfposeidon.exchange.means import weight_of
from tfposeidon.factors import pairs
from tfposeidon.factors.pairs import FactorShape, NoFactorsError, Rows
from tfposeidon.factors.reader import FactorReader
from tfposeidon.gradients import Description
from tfposeidon.policies import HybComm

TABLE, WIDTH = 70_000, 3


def _rows(dtype, indices, seed=0):
    values = np.random.default_rng(seed).normal(size=(len(indices), WIDTH))
    return Rows(tf.constant(indices, tf.int32), tf.cast(values, dtype), table=TABLE)


def _dense(rows):
    result = np.zeros((TABLE, WIDTH))
    np.add.at(result, rows.left.numpy(), tf.cast(rows.right, tf.float64).numpy())
    return result.reshape(-1)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_rows_of_several_ranks_add_up(dtype):
    # Indices exceed 2^16, so that all their bits count.
    ranks = [
        _rows(dtype, [5, 69_999, 5, 0], 1),
        _rows(dtype, [69_999, 300], 2),
        _rows(dtype, [], 3),
    ]
    packed = [rank.packed for rank in ranks]
    assert [p.shape[0] for p in packed] == [3, 2, 0]
    total = ranks[0].product(tf.concat(packed, 0)).numpy()
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6)
    np.testing.assert_allclose(total, sum(map(_dense, ranks)), atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_multiply_rows_and_drop_empty_batches(dtype):
    rows = _rows(dtype, [5, 7, 5])
    weighted = rows.weighted(tf.constant(1.37))
    np.testing.assert_allclose(weighted.product(weighted.packed), 1.37 * _dense(rows), atol=5e-3)
    # A gradient of an empty batch is ignored, even if no rank has samples.
    nothing = weight_of(tf.constant(0.0), tf.constant(0.0), 2)
    empty = Rows(rows.left, rows.right * float("nan"), table=TABLE).weighted(nothing)
    np.testing.assert_array_equal(empty.product(empty.packed), 0.0)


@pytest.mark.parametrize(
    ("dtype", "columns"), [("float32", 1), ("float64", 1), ("float16", 2), ("bfloat16", 2)]
)
def test_sent_bytes_equal_the_packed_bytes(dtype, columns):
    rows = _rows(dtype, [3, 1, 2])
    assert rows.shape.left_columns == columns
    sent = rows.packed
    assert (
        FactorShape(3, TABLE, WIDTH, dtype, indexed=True).bytes
        == sent.shape[0] * sent.shape[1] * sent.dtype.size
    )


def test_embedding_rows_are_found_in_a_model():
    model = keras.Sequential(
        [keras.Input((8,), dtype="int32"), keras.layers.Embedding(50, 4), keras.layers.Flatten()]
    )
    table = model.trainable_variables[0]
    description = Description(table.path, (50, 4), "float32")
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 8], tf.int32)])
    def check(tokens):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tokens) ** 2)
        gradient = tape.gradient(loss, table.value)
        found.extend(FactorReader().find([gradient], [description], [table]))
        rows = pairs.rows_of(gradient, (50, 4))
        return rows.product(rows.packed), tf.convert_to_tensor(gradient)

    product, gradient = check(np.random.default_rng(0).integers(0, 50, (5, 8)).astype("int32"))
    np.testing.assert_allclose(product, tf.reshape(gradient, [-1]), rtol=1e-5)
    shape = {
        "rows": None,
        "left": 50,
        "right": 4,
        "dtype": "float32",
        "has_local": False,
        "indexed": True,
    }
    assert found == [{**shape, "constants": ""}]


def test_a_dense_gradient_is_sent_as_rows():
    matrix = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    rows = pairs.as_product(matrix, FactorShape(None, 6, 3, "float32", indexed=True))
    np.testing.assert_array_equal(rows.product(rows.packed), matrix.reshape(-1))
    np.testing.assert_array_equal(rows.own_product, matrix.reshape(-1))


def test_tables_of_matrices_have_no_rows():
    with pytest.raises(NoFactorsError, match="its rows are not vectors"):
        pairs.rows_of(tf.IndexedSlices(tf.zeros([2, 3, 3]), tf.constant([0, 1])), (5, 3, 3))


@pytest.mark.parametrize(("table", "scheme"), [(30_000, "factors"), (100, "ps")])
def test_hybcomm_sends_the_smaller_form(table, scheme):
    shape = FactorShape(1024, table, 256, "float32", indexed=True)
    description = Description("embedding", (table, 256), "float32", shape)
    choice = HybComm().choose(description, Topology.regular(0, 4, 1))
    assert choice.scheme.name == scheme
    rows, matrix = (size for _, size in choice.candidates)
    assert rows == 2 * 1024 * 3 * 257 * 4
    assert matrix == 2 * table * 256 * 6 / 4 * 4
