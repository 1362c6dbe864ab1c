"""Compares the shapes of the benchmarks' models with Keras's models and with published totals."""

import math
from collections import Counter
from functools import cache

import keras
import pytest
import tensorflow as tf

from benchmarks.architectures import MODELS, model
from tfposeidon.lab.accelerator import emulated_model

KERAS = {
    "resnet50": keras.applications.ResNet50,
    "resnet152": keras.applications.ResNet152,
    "vgg19": keras.applications.VGG19,
    "inception_v3": keras.applications.InceptionV3,
}
everywhere = pytest.mark.parametrize("name", MODELS)
in_keras = pytest.mark.parametrize("name", KERAS)


@cache
def keras_layers(name):
    """Returns the kernels, with their FLOPs, and the number of parameters of a Keras model."""
    built = KERAS[name](weights=None)
    products = (keras.layers.Conv2D, keras.layers.Dense)
    found = [layer for layer in built.layers if isinstance(layer, products)]
    kernels = Counter((tuple(layer.kernel.shape), flops_of(layer)) for layer in found)
    values = sum(math.prod(variable.shape) for variable in built.trainable_variables)
    return kernels, values - biases_before_normalization(found, built)


def flops_of(layer):
    positions = layer.output.shape[1:-1]
    return 2 * math.prod(layer.kernel.shape) * math.prod(positions)


def biases_before_normalization(found, built):
    """Counts biases that Keras's ResNets have before normalization and the paper's do not."""
    normalized = any(isinstance(layer, keras.layers.BatchNormalization) for layer in built.layers)
    return sum(
        layer.filters
        for layer in found
        if normalized and hasattr(layer, "filters") and layer.use_bias
    )


@in_keras
@pytest.mark.slow
def test_parameters_equal_those_of_keras(name):
    assert model(name).parameters == keras_layers(name)[1]


@in_keras
@pytest.mark.slow
def test_every_kernel_and_its_flops_equal_those_of_keras(name):
    assert (
        Counter((layer.kernel, layer.flops) for layer in model(name).layers)
        == keras_layers(name)[0]
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("alexnet", 60_965_224),  # Theano-MPI, Table 2
        (
            "googlenet",
            13_378_280 - 2 * (2048 * 1024 + 1024 + 1024 * 1000 + 1000) - (512 + 1 + 528 + 1) * 128,
        ),
        ("resnet50", 25_557_032),  # torchvision, without biases before normalization
        ("resnet152", 60_192_808),
        ("vgg19_22k", 143_667_240 + 4097 * (21_841 - 1000)),
    ],
)
def test_parameters_equal_the_published_numbers(name, parameters):
    # Theano-MPI counts GoogLeNet's two auxiliary heads: 1 x 1 x 128 after 4a and 4d, then 2048 x
    # 1024 and 1024 x 1000.
    assert model(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "millions", "tolerance"),
    [
        ("vgg19_22k", 229, 0.005),  # Poseidon, section 5
        ("transformer_110m", 110, 0.03),  # CommLib, section 5.3
        ("gpt2", 124.44, 0.001),  # keras_hub.models.GPT2Backbone.from_preset("gpt2_base_en")
    ],
)
def test_parameters_are_near_the_published_numbers(name, millions, tolerance):
    assert model(name).parameters == pytest.approx(millions * 1e6, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "multiply_adds"),
    [
        ("googlenet", 1.5e9),  # Szegedy et al. 2015, section 1
        ("vgg19", 19.6e9),  # He et al. 2016, Figure 3 and Table 1, also for ResNets
        ("resnet50", 3.8e9),
        ("resnet152", 11.3e9),
    ],
)
def test_flops_are_near_the_published_numbers(name, multiply_adds):
    assert model(name).flops / 2 == pytest.approx(multiply_adds, rel=0.06)


def test_dense_layers_of_vgg19_22k_have_the_published_share_of_the_parameters():
    vgg = model("vgg19_22k")
    dense = sum(layer.parameters for layer in vgg.layers if layer.rows)
    assert dense / vgg.parameters == pytest.approx(0.91, abs=0.005)  # Poseidon, section 5.1


def test_flops_of_transformers_include_kernels_scores_and_logits():
    found = model("transformer_110m")
    layers = found.layers
    tokens, width = layers[0].kernel
    length = layers[-1].rows
    attentions = sum(layer.name.endswith("query") for layer in layers)
    kernels = sum(2 * math.prod(layer.kernel) * length for layer in layers if layer.rows)
    expected = kernels + attentions * 4 * length**2 * width + 2 * length * tokens * width
    assert found.flops == expected


@pytest.mark.parametrize(
    ("name", "step_s"),
    [
        ("alexnet", 31.2 / 40),
        ("resnet50", 256 / 1150),
        ("vgg19_22k", 32 / 34.8),
    ],
)
def test_steps_take_as_long_as_in_the_papers(name, step_s):
    assert model(name).step_s == pytest.approx(step_s)


def test_resnet152_computes_as_fast_as_inception():
    resnet, inception = model("resnet152"), model("inception_v3")
    flops_per_s = inception.batch * inception.flops / inception.step_s
    assert resnet.batch * resnet.flops / resnet.step_s == pytest.approx(flops_per_s)


@everywhere
def test_layers_have_unique_names_valid_kernels_and_flops(name):
    found = model(name)
    assert found.name == name
    assert len({layer.name for layer in found.layers}) == len(found.layers)
    for layer in found.layers:
        assert len(layer.kernel) == 2 or (len(layer.kernel) == 4 and layer.rows == 0)
        assert (layer.flops == 0) == (layer.name in ("tokens", "positions"))
        assert set(layer.vectors) <= {layer.kernel[-1]}


@everywhere
def test_times_of_layers_add_up_to_the_step_time(name):
    found = model(name)
    times = found.times()
    assert len(times) == len(found.layers)
    assert sum(map(sum, times)) == pytest.approx(found.step_s)
    assert all(backward_s == pytest.approx(2 * forward_s) for forward_s, backward_s in times)


@everywhere
def test_shrunk_preserves_times_and_the_ratio_of_factors_to_matrix(name):
    full, small = model(name), model(name).shrunk(4)
    assert small.name == f"{name}/4"
    assert small.batch == round(full.batch / 4)
    assert small.step_s == pytest.approx(full.step_s)
    assert sum(small.times(), ()) == pytest.approx(sum(full.times(), ()))
    # Vectors and image kernels shrink only by 4, but are a small share.
    assert small.parameters == pytest.approx(full.parameters / 16, rel=0.02)
    for before, after in zip(full.layers, small.layers, strict=True):
        if before.rows:
            assert factors_to_matrix(after, small) == pytest.approx(
                factors_to_matrix(before, full), rel=0.01
            )


def factors_to_matrix(layer, of):
    return of.batch * layer.rows * sum(layer.kernel) / math.prod(layer.kernel)


def test_shrunk_preserves_windows_and_images_and_empties_no_layer():
    small = model("alexnet").shrunk(1000)
    assert small.batch == 1
    assert [layer.kernel for layer in small.layers[:2]] == [(11, 11, 3, 1), (5, 5, 1, 1)]
    assert all(min(*layer.kernel, *layer.vectors) >= 1 for layer in small.layers)


def test_shrunk_layers_still_fit_together():
    dense = model("vgg19_22k").shrunk(3).layers[-3:]
    assert [layer.kernel for layer in dense] == [(8363, 1365), (1365, 1365), (1365, 7280)]
    assert [layer.vectors for layer in dense] == [(1365,), (1365,), (7280,)]


@pytest.mark.parametrize("factor", [0, 0.5, -1, math.nan])
def test_shrunk_refuses_to_enlarge(factor):
    with pytest.raises(
        ValueError, match=f"`factor` must be a finite number >= 1. Received: factor={factor}"
    ):
        model("vgg19").shrunk(factor)


def test_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match=r"`name` must be one of alexnet, googlenet, .*Received: name='lenet'"
    ):
        model("lenet")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg19", "transformer_110m"])
def test_the_pool_of_values_holds_the_largest_gradient(name):
    found = model(name).shrunk(16)
    emulated = emulated_model(found, dilation=0.01)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(emulated(tf.ones(emulated.input_shape)))
    gradients = tape.gradient(loss, [variable.value for variable in emulated.trainable_variables])
    assert sum(math.prod(gradient.shape) for gradient in gradients) == found.parameters
