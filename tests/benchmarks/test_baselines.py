"""The schemes of the benchmarks, beside what the tables of all schemes test of them."""

import pytest

import tfposeidon as tp
from benchmarks import baselines
from benchmarks.exchanges import SCHEMES, one_server_each
from tfposeidon.lab import models
from tfposeidon.lab.accelerator import emulated_model


@pytest.mark.parametrize("name", baselines.SYSTEMS)
def test_their_names_are_those_of_results_alone(name):
    assert isinstance(SCHEMES[name](), tp.schemes.Scheme)
    assert type(SCHEMES[name]()) not in map(type, (make() for make in tp.schemes.REGISTRY.values()))
    with pytest.raises(ValueError, match=rf'must be one of "auto", .*Received: scheme=.{name}.'):
        tp.DistributedOptimizer("sgd", scheme=name)


def test_each_dense_kernel_has_a_server():
    """As the emulated models name them."""
    model = emulated_model(models.model("vgg19_32").shrunk(16), dilation=1.0, seed=0)
    lengths = {v.path: v.value.shape.num_elements() for v in model.trainable_variables}
    *kernels, rest = one_server_each(lengths, ranks=2)
    assert [(pattern, scheme.server) for pattern, scheme in kernels] == [
        ("dense3/kernel$", 0),
        ("dense2/kernel$", 1),
        ("dense1/kernel$", 0),
    ]
    assert rest == (".*", "ps")
