"""Describes models as the papers train them: shapes and FLOPs of layers, batch and throughput.

ResNet's convolutions have no bias, as in the paper but unlike in Keras. Differs from the papers:
GoogLeNet and Inception-V3 have no auxiliary heads. FLOPs count only products, not pooling,
activation and normalization.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from tfposeidon import checks

Kind = Literal["convolution", "dense", "embedding"]
IMAGE_CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Layer with parameters; its name is unique within the model.

    >>> *_, layer = alexnet()
    >>> layer.name, layer.kernel, layer.parameters
    ('dense3', (4096, 1000), 4097000)

    `kernel` is (height, width, channels in per group, channels out) for a convolution, and (in,
    out) for a dense layer or embedding. `vector_count` is the number of other parameters with one
    value per output: the bias, or the parameters of the following normalization. `flops` counts the
    forward pass per sample, with 2 for a multiply-add.
    """

    name: str
    kernel: tuple[int, ...]
    # The kernel's gradient comes from a convolution, a matrix product or a scatter of rows. In
    # transformers, the logits share the "tokens" embedding, so a matrix product adds to its
    # gradient.
    kind: Kind
    vector_count: int = 1
    flops: float
    # The product that yields the kernel's gradient has this many rows per sample: 1, or the length
    # of the sequence. Convolutions have 0.
    rows: int = 1

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
        if self.kind != "convolution" or inputs != IMAGE_CHANNELS:
            inputs = divided(inputs, factor)
        return replace(self, kernel=(*window, inputs, divided(outputs, factor)))


def divided(length: int, factor: float) -> int:
    """Returns a dimension divided by a factor, rounded, and at least 1."""
    return max(1, round(length / factor))


def _convolution(name: str, kernel: tuple[int, ...], side: int, vectors: int = 1) -> Layer:
    """Returns a layer with an output of `side` x `side`."""
    flops = 2 * math.prod(kernel) * side**2
    return Layer(
        name=name, kernel=kernel, kind="convolution", vector_count=vectors, flops=flops, rows=0
    )


def _stem(*shapes: tuple[int, int, int, int]) -> Iterator[Layer]:
    """Yields convolutions of (output side, window, channels in, channels out)."""
    for number, (side, window, inputs, out) in enumerate(shapes, 1):
        yield _convolution(f"convolution{number}", (window, window, inputs, out), side)


def _branches(
    name: str, channels: int, branches: str, side: int, last: int = 0, vectors: int = 1
) -> Generator[Layer, None, int]:
    """Yields convolutions in branches from one input; returns the number of output channels.

    "1x1x64 | 1x1x96 3x3x128+1x1x8" has two branches. A convolution is height x width x channels
    out, and "+" joins two parallel convolutions. Outputs are `side` x `side`, but with `last`, the
    output of a branch's end is `last` x `last`.
    """
    ends = 0
    for branch, steps in enumerate(branches.split("|"), 1):
        inputs = channels
        for number, step in enumerate(steps.split(), 1):
            size = last if last and number == len(steps.split()) else side
            kernels = [tuple(map(int, kernel.split("x"))) for kernel in step.split("+")]
            for height, width, out in kernels:
                layer = f"{name}/{branch}.{number}/{height}x{width}"
                yield _convolution(layer, (height, width, inputs, out), size, vectors=vectors)
            inputs = sum(out for _, _, out in kernels)
        ends += inputs
    return ends


def _classifier(*widths: int) -> Iterator[Layer]:
    for number, kernel in enumerate(pairwise(widths), 1):
        yield Layer(name=f"dense{number}", kernel=kernel, kind="dense", flops=2 * math.prod(kernel))


def alexnet() -> Iterator[Layer]:
    """Yields the layers of AlexNet. Source: Krizhevsky et al. 2012."""
    # The second, fourth and fifth convolutions have two groups.
    grouped = (27, 5, 48, 256), (13, 3, 256, 384), (13, 3, 192, 384), (13, 3, 192, 256)
    yield from _stem((55, 11, IMAGE_CHANNELS, 96), *grouped)
    yield from _classifier(6 * 6 * 256, 4096, 4096, 1000)


def vgg19(classes: int) -> Iterator[Layer]:
    """Yields the layers of VGG-19. Source: Simonyan and Zisserman 2015, Table 1, E."""
    channels = IMAGE_CHANNELS
    for stage, (count, width) in enumerate(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))):
        channels = yield from _branches(
            f"stage{stage + 1}", channels, f" 3x3x{width}" * count, 224 >> stage
        )
    yield from _classifier(7 * 7 * channels, 4096, 4096, classes)


def resnet(*blocks: int) -> Iterator[Layer]:
    """Yields the layers of a ResNet with these numbers of bottleneck blocks in its stages.

    Source: He et al. 2016, Table 1. Each convolution is normalized, and the stride of a stage is in
    its first 1 x 1 convolution.
    """
    yield _convolution("convolution1", (7, 7, IMAGE_CHANNELS, 64), 112, vectors=2)
    channels = 64
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        for block in range(1, count + 1):
            shortcut = f" | 1x1x{4 * width}" if block == 1 else ""
            branches = f"1x1x{width} 3x3x{width} 1x1x{4 * width}{shortcut}"
            yield from _branches(
                f"stage{stage + 1}/block{block}", channels, branches, side, vectors=2
            )
            channels = 4 * width
    yield from _classifier(channels, 1000)


GOOGLENET = (  # name, output side, 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, after the pool
    ("3a", 28, 64, 96, 128, 16, 32, 32),
    ("3b", 28, 128, 128, 192, 32, 96, 64),
    ("4a", 14, 192, 96, 208, 16, 48, 64),
    ("4b", 14, 160, 112, 224, 24, 64, 64),
    ("4c", 14, 128, 128, 256, 24, 64, 64),
    ("4d", 14, 112, 144, 288, 32, 64, 64),
    ("4e", 14, 256, 160, 320, 32, 128, 128),
    ("5a", 7, 256, 160, 320, 32, 128, 128),
    ("5b", 7, 384, 192, 384, 48, 128, 128),
)


def googlenet() -> Iterator[Layer]:
    """Yields the layers of GoogLeNet. Source: Szegedy et al. 2015, Table 1."""
    # The two auxiliary heads, left out here, would add 6,379,728 parameters.
    yield from _stem((112, 7, IMAGE_CHANNELS, 64), (56, 1, 64, 64), (56, 3, 64, 192))
    channels = 192
    for name, side, one, three_in, three, five_in, five, pool in GOOGLENET:
        branches = f"1x1x{one} | 1x1x{three_in} 3x3x{three} | 1x1x{five_in} 5x5x{five} | 1x1x{pool}"
        channels = yield from _branches(f"inception{name}", channels, branches, side)
    yield from _classifier(channels, 1000)


INCEPTION_V3 = (  # output side, output side of the branches' ends, branches
    *((35, 35, f"1x1x64 | 1x1x48 5x5x64 | 1x1x64 3x3x96 3x3x96 | 1x1x{n}") for n in (32, 64, 64)),
    (35, 17, "3x3x384 | 1x1x64 3x3x96 3x3x96"),
    *(
        (
            17,
            17,
            f"1x1x192 | 1x1x{n} 1x7x{n} 7x1x192 | "
            f"1x1x{n} 7x1x{n} 1x7x{n} 7x1x{n} 1x7x192 | 1x1x192",
        )
        for n in (128, 160, 160, 192)
    ),
    (17, 8, "1x1x192 3x3x320 | 1x1x192 1x7x192 7x1x192 3x3x192"),
    *((8, 8, "1x1x320 | 1x1x384 1x3x384+3x1x384 | 1x1x448 3x3x384 1x3x384+3x1x384 | 1x1x192"),) * 2,
)


def inception_v3() -> Iterator[Layer]:
    """Yields the layers of Inception-V3 at 299 x 299. Source: Szegedy et al. 2016."""
    # As in Keras, normalization has no gamma. The auxiliary head is left out.
    first = (149, 3, IMAGE_CHANNELS, 32)
    yield from _stem(first, (147, 3, 32, 32), (147, 3, 32, 64), (73, 1, 64, 80), (71, 3, 80, 192))
    channels = 192
    for index, (side, last, branches) in enumerate(INCEPTION_V3):
        pooled = channels if last < side else 0
        channels = pooled + (yield from _branches(f"mixed{index}", channels, branches, side, last))
    yield from _classifier(channels, 1000)


def transformer() -> Iterator[Layer]:
    """Yields the layers of BERT-base without its pooler and segment embedding.

    Source: Devlin et al. 2019. The model represents the Transformer of the CommLib paper, which
    states only 110 M parameters and 256 words. The matrix that embeds the tokens also computes the
    logits.
    """
    blocks, width, tokens, positions, length = 12, 768, 30_522, 512, 256

    def layer(name: str, kernel: tuple[int, int], vectors: int, more: float = 0) -> Layer:
        # `more` is the number of FLOPs that involve no kernel.
        flops = 2 * math.prod(kernel) * length + more
        return Layer(
            name=name, kernel=kernel, kind="dense", vector_count=vectors, flops=flops, rows=length
        )

    for name, entries, vectors in (("tokens", tokens, 0), ("positions", positions, 2)):
        yield replace(layer(name, (entries, width), vectors), kind="embedding", flops=0)
    for block in range(1, blocks + 1):
        for projection in ("query", "key", "value", "output"):
            # The last projection precedes a normalization. The FLOPs of the scores (4 length^2
            # width) involve no kernel, so spread them evenly over the four projections.
            vectors = 3 if projection == "output" else 1
            name = f"encoder{block}/attention1/{projection}"
            yield layer(name, (width, width), vectors, length**2 * width)
        yield layer(f"encoder{block}/inner", (width, 4 * width), 1)
        # Count the FLOPs of the logits at the last layer, which executes them.
        logits = 2 * length * width * tokens if block == blocks else 0
        yield layer(f"encoder{block}/outer", (4 * width, width), 3, logits)


# ------------------------------------------------------------------ models


@dataclass(frozen=True)
class Model:
    """Model as one of the papers trains it.

    `name` is a key of `MODELS`, plus "/factor" if the model is shrunk. `layers` are the layers with
    parameters in the order of the forward pass. `batch` is the number of samples per device and
    step, and `throughput` is the number of samples per second of one device without communication.
    `source` names the source of `batch` and `throughput`, and the device.
    """

    name: str
    layers: tuple[Layer, ...]
    batch: int
    throughput: float
    source: str

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
        dense = (layer for layer in self.layers if layer.kind == "dense")
        factors = (self.batch * layer.rows * max(layer.kernel) for layer in dense)
        others = (math.prod(layer.kernel) for layer in self.layers if layer.kind != "dense")
        return max((*factors, *others))

    @property
    def step_s(self) -> float:
        """Seconds of computation per step on one device, forward and backward."""
        return self.batch / self.throughput

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
        square of `factor` as long as K can decrease. The number of rows per sample, step and layer
        times, and FLOPs do not change, so throughput decreases with the batch size.

        >>> full, quarter = model("vgg19"), model("vgg19").shrunk(4)
        >>> full.batch, quarter.batch, round(full.parameters / quarter.parameters)
        (256, 64, 16)
        """
        checks.check_number("factor", factor, checks.AT_LEAST_1, "Use 1 for the full size.")
        batch = divided(self.batch, factor)
        return replace(
            self,
            name=f"{self.name}/{factor:g}",
            layers=tuple(layer.shrunk(factor) for layer in self.layers),
            batch=batch,
            throughput=batch / self.step_s,
        )


def model(name: str) -> Model:
    """Returns the model with this name, a key of `MODELS`."""
    if name not in MODELS:
        raise ValueError(f"`name` must be one of {', '.join(MODELS)}. Received: name={name!r}")
    return MODELS[name]


POSEIDON = "Poseidon (Zhang et al. 2017), section 5.1 and Table 3; Titan X"
COMMLIB = "CommLib (Shi et al. 2021), section 5.5; V100, mixed precision"
THEANO_MPI = (
    "Theano-MPI (Ma et al. 2016), Table 3: 5,120 images in 31.2 s on one K20m (it seems), 3.90 s "
    "on eight"
)
NO_BATCH = (
    "no batch is published: 8 explains Table 3, given the exposed time per parameter of VGG-19 and "
    "ResNet-50"
)


def _models() -> Iterator[Model]:
    yield Model("alexnet", tuple(alexnet()), 128, 5120 / 31.2, THEANO_MPI)
    yield Model("googlenet", tuple(googlenet()), 128, 257, f"{POSEIDON}, Caffe")
    tensorflow = f"{POSEIDON}, TensorFlow"
    inception = Model("inception_v3", tuple(inception_v3()), 32, 43.2, tensorflow)
    yield inception
    large = Model("vgg19", tuple(vgg19(1000)), 256, 560, COMMLIB)
    yield large
    yield replace(large, name="vgg19_32", batch=32, throughput=38.5, source=tensorflow)
    unmodified = f"{tensorflow} unmodified (34.5 under Poseidon)"
    yield Model("vgg19_22k", tuple(vgg19(21_841)), 32, 34.8, unmodified)
    resnet50 = Model("resnet50", tuple(resnet(3, 4, 6, 3)), 256, 1150, f"{COMMLIB}, 224 x 224")
    yield resnet50
    source = f"{COMMLIB}, Table 4, 96 x 96"
    yield replace(resnet50, name="resnet50_96", throughput=4400, source=source)
    layers = tuple(resnet(3, 8, 36, 3))
    throughput = inception.throughput * inception.flops / sum(layer.flops for layer in layers)
    source = "Not published: scaled from inception_v3 by FLOPs; batch of Poseidon, section 5.1"
    yield Model("resnet152", layers, 32, throughput, source)
    yield Model("transformer_110m", tuple(transformer()), 8, 32, f"{COMMLIB}; {NO_BATCH}")


MODELS: dict[str, Model] = {found.name: found for found in _models()}
