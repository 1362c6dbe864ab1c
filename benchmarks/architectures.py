"""Describes the papers' models for the benchmarks: shapes and FLOPs of layers, batch and step time.

ResNet's convolutions have no bias, as in the paper but unlike in Keras. Differs from the papers:
GoogLeNet and Inception-V3 have no auxiliary heads.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator

from tfposeidon.lab.architectures import (
    IMAGE_CHANNELS,
    VGG19,
    Layer,
    Model,
    classifier,
    convolution,
    vgg19,
)


def _stem(*shapes: tuple[int, int, int, int]) -> Iterator[Layer]:
    """Yields convolutions of (output side, window, channels in, channels out)."""
    for number, (side, window, inputs, out) in enumerate(shapes, 1):
        yield convolution(f"convolution{number}", (window, window, inputs, out), side)


def _branches(
    name: str, channels: int, branches: str, side: int, last: int = 0, vectors: int = 1
) -> Generator[Layer, None, int]:
    """Yields convolutions in branches from one input; returns the number of output channels.

    "1x1x64 | 1x1x96 3x3x128+1x1x8" has two branches. A convolution is height x width x channels
    out, and "+" joins two parallel convolutions. Outputs are `side` x `side`, except that
    with `last`, the final output of each branch is `last` x `last`.
    """
    ends = 0
    for branch, steps in enumerate(branches.split("|"), 1):
        inputs = channels
        for number, step in enumerate(steps.split(), 1):
            size = last if last and number == len(steps.split()) else side
            kernels = [tuple(map(int, kernel.split("x"))) for kernel in step.split("+")]
            for height, width, out in kernels:
                layer = f"{name}/{branch}.{number}/{height}x{width}"
                yield convolution(layer, (height, width, inputs, out), size, vectors=vectors)
            inputs = sum(out for _, _, out in kernels)
        ends += inputs
    return ends


def alexnet() -> Iterator[Layer]:
    """Yields the layers of AlexNet. Source: Krizhevsky et al. 2012."""
    # The second, fourth and fifth convolutions have two groups.
    grouped = (27, 5, 48, 256), (13, 3, 256, 384), (13, 3, 192, 384), (13, 3, 192, 256)
    yield from _stem((55, 11, IMAGE_CHANNELS, 96), *grouped)
    yield from classifier(6 * 6 * 256, 4096, 4096, 1000)


def resnet(*blocks: int) -> Iterator[Layer]:
    """Yields the layers of a ResNet with these numbers of bottleneck blocks in its stages.

    Source: He et al. 2016, Table 1. Each convolution is normalized, and the stride of a stage is in
    its first 1 x 1 convolution.
    """
    yield convolution("convolution1", (7, 7, IMAGE_CHANNELS, 64), 112, vectors=2)
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
    yield from classifier(channels, 1000)


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
    yield from classifier(channels, 1000)


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
    yield from classifier(channels, 1000)


def transformer(tokens: int = 30_522, positions: int = 512) -> Iterator[Layer]:
    """Yields the layers of BERT-base without its pooler and segment embedding.

    Source: Devlin et al. 2019. The model represents the Transformer of the CommLib paper, which
    states only 110 M parameters and 256 words. The matrix that embeds the tokens also computes the
    logits. With 50,257 tokens and 1024 positions, kernels and vectors are those of GPT-2.
    """
    blocks, width, length = 12, 768, 256

    def layer(name: str, kernel: tuple[int, int], vectors: int, more: float = 0) -> Layer:
        # `more` is the number of FLOPs that involve no kernel.
        flops = 2 * math.prod(kernel) * length + more
        return Layer(name=name, kernel=kernel, vector_count=vectors, flops=flops, rows=length)

    # The matrix product of the logits adds to the gradient of "tokens", so it has no factors.
    for name, entries, vectors in (("tokens", tokens, 0), ("positions", positions, 2)):
        yield Layer(name=name, kernel=(entries, width), vector_count=vectors, flops=0)
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


def model(name: str) -> Model:
    """Returns the model with this name, a key of `MODELS`."""
    if name not in MODELS:
        raise ValueError(f"`name` must be one of {', '.join(MODELS)}. Received: name={name!r}")
    return MODELS[name]


def _models() -> Iterator[Model]:
    def trained(name: str, layers: Iterator[Layer], batch: int, per_s: float) -> Model:
        """Returns a model of which one device trains `per_s` samples per second."""
        return Model(name=name, layers=tuple(layers), batch=batch, step_s=batch / per_s)

    # Theano-MPI (Ma et al. 2016), Table 3: 5,120 images in 31.2 s (presumably on one K20m), and
    # 3.90 s on eight.
    yield trained("alexnet", alexnet(), 128, 5120 / 31.2)
    # Poseidon (Zhang et al. 2017), section 5.1 and Table 3, on a Titan X: GoogLeNet on Caffe, the
    # others on TensorFlow; VGG19-22K on unmodified TensorFlow (34.5 images/s with Poseidon).
    yield trained("googlenet", googlenet(), 128, 257)
    inception = trained("inception_v3", inception_v3(), 32, 43.2)
    yield inception
    yield VGG19
    yield trained("vgg19_22k", vgg19(21_841), 32, 34.8)
    # The step time is not published, so scale that of inception_v3 by FLOPs. The batch size is from
    # Poseidon, section 5.1.
    layers = tuple(resnet(3, 8, 36, 3))
    flops = sum(layer.flops for layer in layers)
    step_s = inception.step_s * flops / inception.flops
    yield Model(name="resnet152", layers=layers, batch=32, step_s=step_s)
    # CommLib (Shi et al. 2021), section 5.5, on a V100 in mixed precision. ResNet-50 is measured
    # with 224 x 224 pixels, and in Table 4 with 96 x 96.
    yield trained("vgg19", vgg19(1000), 256, 560)
    yield trained("resnet50", resnet(3, 4, 6, 3), 256, 1150)
    yield trained("resnet50_96", resnet(3, 4, 6, 3), 256, 4400)
    # No batch size is published; 8 is consistent with Table 3, given the exposed communication time
    # per parameter of VGG-19 and ResNet-50.
    bert = trained("transformer_110m", transformer(), 8, 32)
    yield bert
    # `keras_hub.models.GPT2CausalLM`, preset "gpt2_base_en". Its time is scaled by FLOPs.
    layers = tuple(transformer(50_257, 1024))
    step_s = bert.step_s * sum(layer.flops for layer in layers) / bert.flops
    yield Model(name="gpt2", layers=layers, batch=8, step_s=step_s)


MODELS = {found.name: found for found in _models()}
