"""Builds a small model for each layer of Keras with weights, found by introspection."""

import ast
import functools
import inspect
import sys
import textwrap
from dataclasses import dataclass

import keras

L = keras.layers
VOCABULARY = 11


@dataclass(frozen=True)
class Case:
    """A layer in a small model.

    Attributes:
      shape: Shape of one sample.
      apply: Function from the samples to the layer's output.
      factors: Shapes of the variables whose gradients are products of two thin matrices, in the
        layer's order.
      dtype: Dtype of the samples; integers are tokens.
    """

    shape: tuple
    apply: object
    factors: tuple = ()
    dtype: str = "float32"

    def model(self):
        """Returns a model of the layer with one number per sample as output."""
        x = keras.Input(self.shape, dtype=self.dtype)
        return keras.Model(x, number(self.apply(x)))


def number(y):
    """Returns a number per sample, `[batch, 1]`, that depends on all values of the sample."""
    return keras.ops.mean(keras.ops.square(L.Flatten()(y) - 0.5), axis=1, keepdims=True)


def _sequence(apply, *factors):
    return Case((7, 6), apply, factors)


def _image(apply, *factors):
    return Case((6, 6, 3), apply, factors)


def _volume(apply, *factors):
    return Case((4, 4, 4, 2), apply, factors)


def _both_ways(tokens):
    table = L.ReversibleEmbedding(VOCABULARY, 3)
    return table(table(tokens), reverse=True)


def _attention(make, *sizes):
    # Create a new layer for each model.
    return lambda x: make(*sizes)(x, x)


CASES = {
    "AdditiveAttention": _sequence(lambda x: L.AdditiveAttention()([x, x])),
    "Attention": _sequence(lambda x: L.Attention(use_scale=True)([x, x])),
    "BatchNormalization": _sequence(lambda x: L.BatchNormalization()(x)),
    "Bidirectional": _sequence(lambda x: L.Bidirectional(L.GRU(3))(x)),
    "Conv1D": _sequence(lambda x: L.Conv1D(4, 3)(x)),
    "Conv1DTranspose": _sequence(lambda x: L.Conv1DTranspose(4, 3)(x)),
    "Conv2D": _image(lambda x: L.Conv2D(4, 3)(x)),
    "Conv2DTranspose": _image(lambda x: L.Conv2DTranspose(4, 3)(x)),
    "Conv3D": _volume(lambda x: L.Conv3D(4, 3)(x)),
    "Conv3DTranspose": _volume(lambda x: L.Conv3DTranspose(4, 3)(x)),
    "ConvLSTM1D": _image(lambda x: L.ConvLSTM1D(2, 3)(x)),
    "ConvLSTM2D": _volume(lambda x: L.ConvLSTM2D(2, 3)(x)),
    "ConvLSTM3D": Case((2, 4, 4, 4, 2), lambda x: L.ConvLSTM3D(2, 3)(x)),
    "Dense": Case((6,), lambda x: L.Dense(5, activation="relu")(x), ((6, 5),)),
    "DepthwiseConv1D": _sequence(lambda x: L.DepthwiseConv1D(3)(x)),
    "DepthwiseConv2D": _image(lambda x: L.DepthwiseConv2D(3)(x)),
    "EinsumDense": _sequence(
        lambda x: L.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d")(x), (6, 5)
    ),
    "Embedding": Case((7,), lambda x: L.Embedding(VOCABULARY, 3)(x), ((VOCABULARY, 3),), "int32"),
    "GRU": _sequence(lambda x: L.GRU(4)(x)),
    "GRUCell": _sequence(lambda x: L.RNN(L.GRUCell(4))(x)),
    "GroupNormalization": _sequence(lambda x: L.GroupNormalization(2)(x)),
    "GroupedQueryAttention": _sequence(
        _attention(L.GroupQueryAttention, 4, 2, 1), (6, 2, 4), (6, 1, 4), (6, 1, 4), (2, 4, 6)
    ),
    "LSTM": _sequence(lambda x: L.LSTM(4)(x)),
    "LSTMCell": _sequence(lambda x: L.RNN(L.LSTMCell(4))(x)),
    "LayerNormalization": _sequence(lambda x: L.LayerNormalization(axis=[1, 2])(x)),
    "MultiHeadAttention": _sequence(
        _attention(L.MultiHeadAttention, 2, 4), (6, 2, 4), (6, 2, 4), (6, 2, 4), (2, 4, 6)
    ),
    "PReLU": _sequence(lambda x: L.PReLU()(x)),
    "RMSNormalization": _sequence(lambda x: L.RMSNormalization()(x)),
    "RNN": _sequence(lambda x: L.RNN(L.SimpleRNNCell(4))(x)),
    "ReversibleEmbedding": Case((7,), _both_ways, (), "int32"),
    "STFTSpectrogram": Case((40, 1), lambda x: L.STFTSpectrogram(frame_length=16)(x)),
    "SeparableConv1D": _sequence(lambda x: L.SeparableConv1D(4, 3)(x)),
    "SeparableConv2D": _image(lambda x: L.SeparableConv2D(4, 3)(x)),
    "SimpleRNN": _sequence(lambda x: L.SimpleRNN(4)(x)),
    "SimpleRNNCell": _sequence(lambda x: L.RNN(L.SimpleRNNCell(4))(x)),
    "SpectralNormalization": _sequence(lambda x: L.SpectralNormalization(L.Dense(5))(x), (6, 5)),
    "StackedRNNCells": _sequence(
        lambda x: L.RNN(L.StackedRNNCells([L.GRUCell(3), L.LSTMCell(2)]))(x)
    ),
    "TimeDistributed": _sequence(lambda x: L.TimeDistributed(L.Dense(5))(x), (6, 5)),
}
"""Case of each layer class, by name."""

NOT_TRAINED = {
    "FlaxLayer": "of another framework",
    "JaxLayer": "of another framework",
    "Normalization": "its statistics are no gradients' business",
    "Pipeline": "of preprocessing layers",
    "Wrapper": "a base class",
}


def with_weights():
    """Returns the names of all classes in `keras.layers` that create weights or contain layers."""
    classes = {
        value for value in vars(L).values() if inspect.isclass(value) and issubclass(value, L.Layer)
    }
    return {
        cls.__name__
        for cls in classes
        if cls is not L.Layer and (_makes_weights(cls) or _holds_layers(cls))
    }


def _makes_weights(cls):
    names = {name for base in _own_bases(cls) for name in _called(base)}
    if "add_weight" in names:
        return True
    made = [
        getattr(sys.modules[base.__module__], name, None)
        for base in _own_bases(cls)
        for name in _called(base)
    ]
    return any(
        inspect.isclass(m) and issubclass(m, L.Layer) and m is not cls and _makes_weights(m)
        for m in made
    )


def _holds_layers(cls):
    return bool(
        {"layer", "layers", "cell", "cells"} & set(inspect.signature(cls.__init__).parameters)
    )


def _own_bases(cls):
    return cls.__mro__[: cls.__mro__.index(L.Layer)]


@functools.cache
def _called(cls):
    """Returns the names of the functions that the source of a class calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {getattr(function, "attr", getattr(function, "id", "")) for function in calls}
