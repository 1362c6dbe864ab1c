"""1-bit SGD: signs and two means in place of values, with error feedback."""

import dataclasses

import numpy as np
import tensorflow as tf
from typing_extensions import override

from tfposeidon import schemes
from tfposeidon.schemes import stages

SENDING_BITS = 0.0
"""Value of the state "mode", except during a flush."""
CODED_PER_SELECTED = 8
"""Number of elements whose selection takes as long as encoding one element; fitted to the exchanges
of docs/results/exchange_grid.json."""
BLOCK = 4096
"""Number of values per block, which share two means."""
HEADER_BYTES = 12
"""Bytes per block for two means and the number of zeros, as float32."""
BITS = np.unpackbits(np.arange(256, dtype="uint8")[:, None], axis=1).astype(bool)
"""The eight bits of each byte."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneBit(schemes.ResidualScheme):
    """Sums in the node, then sends one bit for each value across nodes, with error feedback.

    Each block of 4096 values of a bucket has two means, of its positive and of its negative values.
    The residual is added to the next gradient. Zeros (of frozen, masked or unused weights) do not
    count for the means, and stay zeros.

    Args:
      min_elements: Variables with fewer elements are sent densely, by `AllReduce` (default 4096).

    Cost: m nodes of n ranks, d elements: d (n - 1) / n values for the scatter and as many for the
    gather in the node; across nodes (m - 1) d / n bits and 3 numbers per block. Blocks in which
    only some values are zero have twice as many bits, which depend on values and are not in `cost`.
    Source: Seide et al. 2014, as compared in Zhang et al. 2017 (Poseidon), section 5.3. Differs:
    blocks of 4096 values replace CNTK's columns; codes are gathered instead of added and encoded
    again; zeros do not count as positive.

    Example:
      >>> topology = schemes.Topology.regular(0, size=4, ranks_per_node=1)
      >>> one_bit, dense = (
      ...     scheme.cost(10**6, itemsize=4, topology=topology).cross_bytes
      ...     for scheme in (OneBit(), schemes.AllReduce())
      ... )
      >>> round(dense / one_bit)
      16
    """

    min_elements: int = 4096

    @override
    def slots(self, length, topology):
        node, rank = _node_shards(length, topology), topology.rank
        residual = schemes.Slot(
            name="residual", shape=(node.length_of(rank),), offset=node.offset_of(rank)
        )
        return schemes.Slot(name="mode", shape=()), residual

    @override
    def exchange(self, gradient, state, wire, name):
        topology, (mode, residual) = wire.topology, state
        node = _node_shards(gradient.shape[0], topology)
        shard = stages.scatter_sum(gradient, node, wire, f"{name}.node_scatter", None)
        # float32 like the residual: in 16 bits, sums would lose small values.
        values = residual + tf.ensure_shape(tf.cast(shard, tf.float32), residual.shape)

        def everything():
            return _dense_sum(values, wire, name), tf.zeros_like(residual)

        def bits():
            code, kept = encode(values)
            codes = wire.all_gather(code, topology.across, f"{name}.bits_across")
            return decoded_sum(codes, topology.across.size, residual.shape[0]), kept

        flushes = mode < SENDING_BITS
        # Bits save bytes only between nodes, so a rank that sends nothing there encodes nothing.
        # `mode` is the same on all ranks, so all take the same branch.
        total, kept = (
            tf.cond(flushes, everything, bits) if _sends_across(topology) else everything()
        )
        mean = stages.gather(total / topology.size, node, wire, f"{name}.node_gather")
        return tf.cast(mean, gradient.dtype), (tf.where(flushes, self.FLUSHED, mode), kept)

    @override
    def stages(self, length, itemsize, topology):
        node = _node_shards(length, topology)
        # The gather carries float32, whatever the dtype of the gradient.
        scatter = stages.scatter_sum_stages(node, itemsize, topology, None, "node_scatter")
        back = stages.gather_stages(node, 4, None, "node_gather")
        if not _sends_across(topology):
            return scatter + back
        own_length, nodes = node.length_of(topology.rank), topology.across.size
        coded = CODED_PER_SELECTED * own_length
        parts_bytes = [float(code_bytes(own_length))] * nodes
        return (
            *scatter,
            schemes.Work(name="encode", kind="select", elements=coded),
            *stages.gathering(topology.across, parts_bytes, "bits_across", itemsize=1),
            schemes.Work(name="bits_across.sum", kind="sum", elements=nodes * own_length),
            *back,
        )


def _node_shards(length, topology):
    return stages.Shards.even(length, topology.node, owners=topology.positions)


def _sends_across(topology):
    """Returns whether this rank sends to other nodes."""
    return topology.across is not None and topology.across.size > 1


def _dense_sum(shard, wire, name):
    if not _sends_across(wire.topology):
        return shard
    return wire.all_reduce(shard, wire.topology.across, f"{name}.across")


def encode(values):
    """Encodes values as their signs, one bit each, and two means for each block of 4096.

    Args:
      values: `[n]` float32, `n` static.

    Returns:
      `code`, uint8, and the residual, `values - decoded_sum(code, 1, n)`. The code has the signs,
      eight per byte; then for each block the means of its positive and of its negative values and
      the number of its zeros; then, for each block with zeros and other values, their mask.

    Example:
      >>> code, kept = encode(tf.constant([1.0, 3.0, -4.0]))
      >>> decoded_sum(code, 1, 3).numpy().tolist(), kept.numpy().tolist()
      ([2.0, 2.0, -4.0], [-1.0, 1.0, 0.0])
    """
    length, blocks = values.shape[0], _blocks(values.shape[0])
    rows = tf.reshape(tf.pad(values, [[0, blocks * BLOCK - length]]), [blocks, BLOCK])
    # NaN counts as positive, so that all ranks see it.
    negative, zero = rows < 0.0, tf.equal(rows, 0.0)
    below, zeros = _count(negative), _count(zero) - _padding(length)
    above = _lengths(length) - below - zeros
    means = [
        tf.math.divide_no_nan(tf.reduce_sum(tf.where(negative, *either), 1), count)
        for either, count in (((0.0, rows), above), ((rows, 0.0), below))
    ]
    said = tf.where(negative, means[1][:, None], tf.where(zero, 0.0, means[0][:, None]))
    header = tf.bitcast(tf.stack([*means, zeros], 1), tf.uint8)
    masks = tf.boolean_mask(zero, _is_mixed(zeros, length))
    signs = tf.reshape(_packed(negative), [-1])[: -(-length // 8)]
    code = tf.concat([signs, *(tf.reshape(part, [-1]) for part in (header, _packed(masks)))], 0)
    return code, tf.reshape(rows - said, [-1])[:length]


def decoded_sum(codes, count, length):
    """Returns the sum of the vectors of several codes, added in their order.

    Args:
      codes: Concatenated codes of `encode`, uint8.
      count: Number of codes.
      length: Number of values of each code.

    Returns:
      `[length]` float32.
    """
    blocks = _blocks(length)
    total = tf.zeros([blocks, BLOCK])
    for _ in range(count):
        signs, header, masks = tf.split(codes, [-(-length // 8), HEADER_BYTES * blocks, -1])
        header = tf.bitcast(tf.reshape(header, [blocks, 3, 4]), tf.float32)
        above, below, zeros = (header[:, index] for index in range(3))
        is_mixed = tf.cast(_is_mixed(zeros, length), tf.int32)
        padding = blocks * BLOCK // 8 - signs.shape[0]
        negative = _unpacked(tf.reshape(tf.pad(signs, [[0, padding]]), [blocks, BLOCK // 8]))
        said = tf.where(negative, below[:, None], above[:, None])
        own, codes = tf.split(masks, [tf.reduce_sum(is_mixed) * (BLOCK // 8), -1])
        total += tf.cond(
            tf.size(own) > 0,
            lambda said=said, own=own, is_mixed=is_mixed: _with_zeros(said, own, is_mixed),
            lambda said=said: said,
        )
    return tf.reshape(total, [-1])[:length]


def code_bytes(length):
    """Returns the size in bytes of the code of a vector without zeros.

    Example:
      >>> code_bytes(4096)
      524
    """
    return -(-length // 8) + HEADER_BYTES * _blocks(length)


def _with_zeros(said, masks, is_mixed):
    """Sets the masked values of mixed blocks to zero."""
    none = tf.zeros([1, BLOCK // 8], tf.uint8)
    rows = tf.concat([none, tf.reshape(masks, [-1, BLOCK // 8])], 0)
    zero = _unpacked(tf.gather(rows, is_mixed * tf.cumsum(is_mixed)))
    return tf.where(zero, 0.0, said)


def _blocks(length):
    return -(-length // BLOCK)


def _padding(length):
    """Returns the number of values that each block lacks; only the last block may lack some."""
    return np.clip(BLOCK * np.arange(1, _blocks(length) + 1) - length, 0, None).astype("float32")


def _lengths(length):
    return BLOCK - _padding(length)


def _is_mixed(zeros, length):
    return (zeros > 0.0) & (zeros < _lengths(length))


def _count(bits):
    return tf.reduce_sum(tf.cast(bits, tf.float32), 1)


def _packed(bits):
    """Packs the bits of rows, eight per byte, the first into the highest bit."""
    weights = 2.0 ** np.arange(7, -1, -1, dtype="float32")[:, None]
    # Use a matrix product, since TensorFlow has no op for this; sums of powers of 2 are exact.
    return tf.cast(tf.reshape(tf.cast(bits, tf.float32), [-1, 8]) @ weights, tf.uint8)


def _unpacked(rows):
    return tf.reshape(tf.gather(BITS, tf.cast(rows, tf.int32)), [-1, BLOCK])
