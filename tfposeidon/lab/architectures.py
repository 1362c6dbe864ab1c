"""Describes models and emulates the time and the gradients of an accelerator, for any framework.

A model is a list of layers with the shapes, the FLOPs and the step time that a paper reports.
`accelerator` makes Keras models of such lists, and the benchmarks make PyTorch and JAX models.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from tfposeidon import checks

if TYPE_CHECKING:  # `install` runs before NumPy is installed.
    import numpy as np
    from numpy.typing import NDArray

IMAGE_CHANNELS = 3
SCALE = 1e-3
"""Scale of gradient values."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Layer with parameters; its name is unique within the model.

    >>> *_, layer = vgg19(1000)
    >>> layer.name, layer.kernel, layer.parameters
    ('dense3', (4096, 1000), 4097000)

    `kernel` is (height, width, input channels per group, output channels) for a convolution, and
    (inputs, outputs) for a dense layer or embedding. `vector_count` is the number of parameter
    vectors with one value per output: the bias, or the vectors of the normalization that follows.
    `flops` is the number of floating-point operations of the convolutions and matrix products in
    the forward pass of one sample; a multiply-add counts as 2. `rows` is the number of rows per
    sample in both operands of the matrix product that computes the kernel's gradient: 1 for a dense
    layer, or the sequence length if the layer is applied to a sequence; 0 for convolutions and
    embeddings.
    """

    name: str
    kernel: tuple[int, ...]
    vector_count: int = 1
    flops: float
    rows: int = 0

    @property
    def vectors(self) -> tuple[int, ...]:
        """Lengths of the parameters other than the kernel."""
        return (self.kernel[-1],) * self.vector_count

    @property
    def parameters(self) -> int:
        return math.prod(self.kernel) + sum(self.vectors)

    def shrunk(self, factor: float) -> Layer:
        """Returns the layer with channels, matrix sides and vectors divided by `factor`."""
        # Convolution windows, the channels of images, and FLOPs do not change.
        *window, inputs, outputs = self.kernel
        if not window or inputs != IMAGE_CHANNELS:
            inputs = divided(inputs, factor)
        return replace(self, kernel=(*window, inputs, divided(outputs, factor)))


def divided(length: int, factor: float) -> int:
    """Returns a dimension divided by a factor, rounded, and at least 1."""
    return max(1, round(length / factor))


def convolution(name: str, kernel: tuple[int, ...], side: int, vectors: int = 1) -> Layer:
    """Returns a convolution with an output of `side` x `side`."""
    flops = 2 * math.prod(kernel) * side**2
    return Layer(name=name, kernel=kernel, vector_count=vectors, flops=flops)


def classifier(*widths: int) -> Iterator[Layer]:
    """Yields dense layers, each from one of the widths to the next."""
    for number, kernel in enumerate(pairwise(widths), 1):
        yield Layer(name=f"dense{number}", kernel=kernel, flops=2 * math.prod(kernel), rows=1)


def vgg19(classes: int) -> Iterator[Layer]:
    """Yields the layers of VGG-19. Source: Simonyan and Zisserman 2015, Table 1, E."""
    channels = IMAGE_CHANNELS
    for stage, (count, width) in enumerate(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))):
        for number in range(1, count + 1):
            name = f"stage{stage + 1}/convolution{number}"
            yield convolution(name, (3, 3, channels, width), 224 >> stage)
            channels = width
    yield from classifier(7 * 7 * channels, 4096, 4096, classes)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model as a paper trains it.

    `name` has the suffix "/factor" if the model is shrunk. `layers` are the layers with parameters
    in the order of the forward pass, `batch` is the number of samples per device and step, and
    `step_s` the seconds of computation per step on one device, forward and backward.
    """

    name: str
    layers: tuple[Layer, ...]
    batch: int
    step_s: float

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass per sample, which `shrunk` does not change."""
        return sum(layer.flops for layer in self.layers)

    @property
    def largest(self) -> int:
        """Number of values of the largest gradient or sufficient factor."""
        return max(
            self.batch * layer.rows * max(layer.kernel) if layer.rows else math.prod(layer.kernel)
            for layer in self.layers
        )

    def times(self) -> tuple[tuple[float, float], ...]:
        """Returns each layer's forward and backward time in seconds; the sum is `step_s`."""
        # Distribute the step time by FLOPs. A backward pass takes twice as long as a forward pass,
        # because it computes two products instead of one, for the gradients of kernel and input.
        flop_s = self.step_s / (3 * self.flops)
        return tuple((layer.flops * flop_s, 2 * layer.flops * flop_s) for layer in self.layers)

    def shrunk(self, factor: float) -> Model:
        """Returns a model that represents this one with less memory.

        Matrix dimensions M and N and batch size K are divided by `factor`, rounded, and at least 1.
        Factors have K (M + N) elements and matrices M N, so the sizes of both decrease with the
        square of `factor` as long as K can decrease. The number of rows per sample, the times of
        steps and layers, and FLOPs do not change.

        >>> quarter = VGG19.shrunk(4)
        >>> VGG19.batch, quarter.batch, round(VGG19.parameters / quarter.parameters)
        (32, 8, 16)
        """
        checks.check_number("factor", factor, checks.AT_LEAST_1, "Use 1 for the full size.")
        return replace(
            self,
            name=f"{self.name}/{factor:g}",
            layers=tuple(layer.shrunk(factor) for layer in self.layers),
            batch=divided(self.batch, factor),
        )


# Source: Poseidon (Zhang et al. 2017), section 5.1 and Table 3: TensorFlow on a Titan X.
VGG19 = Model(name="vgg19_32", layers=tuple(vgg19(1000)), batch=32, step_s=32 / 38.5)


class Stream:
    """Queue of work that an emulated accelerator executes in order.

    As on a real accelerator, the work of a step is queued ahead: a kernel starts when the previous
    one ended, even if the host noticed its end late. The load of the machine therefore does not
    increase the time of a step. Tests replace `clock` and `sleep`.

    >>> now_s = [0.0]
    >>> stream = Stream(clock=lambda: now_s[0], sleep=lambda s: now_s.append(now_s.pop() + s))
    >>> stream.begin()
    >>> stream.run(0.5)
    >>> now_s
    [0.5]
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._free_s = clock()

    def begin(self) -> None:
        """Starts a step: the accelerator is free now."""
        self._free_s = self._clock()

    def run(self, seconds: float) -> None:
        """Queues work of this many seconds, and waits until it would be done."""
        # Work starts at the end of the previous work, not at the time of the call, so a late call
        # sleeps less.
        self._free_s += seconds
        wait_s = self._free_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)


def gradient_values(length: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """Returns `[length]` float32: normal values with log-normal scales."""
    values = generator.standard_normal(length, dtype="float32")
    values *= generator.lognormal(math.log(SCALE), size=length)
    return values
