"""Tests checksums of tensors, which GPUs compute for tensors in their memory."""

import numpy as np
import pytest
import tensorflow as tf

from tfposeidon.exchange.replicas import sums

DTYPES = "bool float8_e4m3fn int8 float16 bfloat16 uint16 float32 int32 float64 uint64 complex128"


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_checksums_depend_on_each_bit_and_the_order(dtype):
    """The numbers include 1, most of whose bits are zero."""
    numbers = np.array([1, 0, 1, 2, 0.5], "float32").astype(tf.as_dtype(dtype).as_numpy_dtype)
    versions = [numbers, numbers[::-1]]
    for byte in range(numbers.nbytes if dtype != "bool" else 0):
        for bit in range(8):
            flipped = numbers.copy()
            flipped.view("u1")[byte] ^= 1 << bit
            versions.append(flipped)
    found = sums([tf.constant(version) for version in versions])
    assert len(set(found)) == len(versions)
    assert sums([tf.constant(numbers)]) == found[:1]


def test_checksums_of_long_tensors_depend_on_each_element():
    long = np.zeros(2**20 + 2, "float64")
    versions = [long, *(np.where(np.arange(len(long)) == n, 1.0, 0.0) for n in (1, 2**19, 2**20))]
    assert len(set(sums([tf.constant(version) for version in versions]))) == len(versions)


def test_empty_lists_and_tensors_have_checksums():
    assert sums([]) == []
    assert sums([tf.zeros([0, 3]), tf.constant(0.0)]) == [0, 0]
