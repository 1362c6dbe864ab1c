"""Tests properties of the benchmarks' own schemes that the contract table does not cover."""

import numpy as np
import pytest
import tensorflow as tf

import tfposeidon as tp
from benchmarks import baselines
from benchmarks.baselines import one_bit
from benchmarks.exchanges import SCHEMES, one_server_each
from tests import contract
from tests.in_process import Cluster
from tests.schemes.test_schemes import LAYOUTS
from tfposeidon.lab.accelerator import emulated_model
from tfposeidon.lab.architectures import VGG19


@pytest.mark.parametrize("name", baselines.SYSTEMS)
def test_baseline_schemes_are_not_registered(name):
    assert isinstance(SCHEMES[name](), tp.schemes.Scheme)
    assert type(SCHEMES[name]()) not in map(type, (make() for make in tp.schemes.REGISTRY.values()))
    with pytest.raises(ValueError, match=rf'must be one of "auto", .*Received: scheme=.{name}.'):
        tp.DistributedOptimizer("sgd", scheme=name)


def test_each_dense_kernel_has_a_factor_server():
    """The patterns match the names of the emulated models' kernels."""
    model = emulated_model(VGG19.shrunk(16), dilation=1.0, seed=0)
    lengths = {v.path: v.value.shape.num_elements() for v in model.trainable_variables}
    *kernels, rest = one_server_each(lengths, ranks=2)
    assert [(pattern, scheme.server) for pattern, scheme in kernels] == [
        ("dense3/kernel$", 0),
        ("dense2/kernel$", 1),
        ("dense1/kernel$", 0),
    ]
    assert rest == (".*", "ps")


@pytest.mark.parametrize("layout", ["1", "2x1", "1x3", "2+1", "2x2", "3+1+2"])
@pytest.mark.parametrize("length", [1, 31, 9_001])
def test_one_bit_sends_each_part_of_a_gradient_or_retains_it(length, layout):
    ends = Cluster(LAYOUTS[layout]).run(
        lambda wire: contract.check_conservation(
            baselines.OneBit(), length, wire, 5, "x", flush_at=4
        )[0]
    )
    for mean in ends:
        np.testing.assert_array_equal(mean, ends[0], "ranks differ")


def test_one_bit_sends_one_bit_per_value_and_two_means_per_block():
    topology = tp.schemes.Topology.regular(0, 8, 1)
    bits = 8 * baselines.OneBit().cost(2**24, 4, topology).cross_bytes
    assert bits / 7 / 2**24 == pytest.approx(1 + 96 / 4096)


@pytest.mark.parametrize("zeros", ["none", "some", "in a block", "all"])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 4096, 4097, 10_000])
def test_a_code_decodes_to_the_two_means_of_each_block(length, zeros):
    draw = np.random.default_rng(length)
    values = draw.normal(size=length).astype("float32")
    places = {
        "none": [],
        "some": draw.integers(0, max(length, 1), length // 2),
        "in a block": slice(4096),
        "all": slice(None),
    }
    values[places[zeros]] = 0.0
    code, kept = one_bit.encode(values)
    if zeros != "some":
        assert code.shape == (one_bit.code_bytes(length),)
    said = np.zeros(length, "float32")
    for begin in range(0, length, 4096):
        block = values[begin : begin + 4096]
        for chosen in (block > 0, block < 0):
            said[begin : begin + 4096][chosen] = block[chosen].mean() if chosen.any() else 0
    decoded = one_bit.decoded_sum(code, 1, length)
    np.testing.assert_allclose(decoded, said, atol=1e-6)
    np.testing.assert_allclose(decoded + kept, values, atol=1e-6)
    assert not np.any(kept.numpy()[values == 0])
    twice = one_bit.decoded_sum(tf.concat([code, code], 0), 2, length)
    np.testing.assert_array_equal(twice, 2 * decoded)


def test_zeros_do_not_dilute_the_mean_of_one_bit():
    gradient = np.zeros(4096, "float32")
    gradient[:10] = 1.5
    gradient[10:13] = -4.0
    code, kept = one_bit.encode(gradient)
    np.testing.assert_array_equal(one_bit.decoded_sum(code, 1, 4096), gradient)
    assert not np.any(kept)
