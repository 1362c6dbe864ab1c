"""Shapes, FLOPs and single-device speeds of the models that the papers train.

ResNet's convolutions have no bias, as in the paper and unlike those of Keras. Differs from the
papers: GoogLeNet and Inception-V3 are without auxiliary heads. FLOPs are those of products, not of
pooling, activation and normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal

from tfposeidon import ranges

Kind = Literal["convolution", "dense", "embedding"]
IMAGE_CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Layer with parameters.

    >>> layer = model("alexnet").layers[-1]
    >>> layer.name, layer.kernel, layer.parameters
    ('dense3', (4096, 1000), 4097000)

    Attributes:
      name: Name, unique within the model.
      kernel: (height, width, channels in, channels out) of a convolution, with the channels in of
        one group where it is grouped; (in, out) of a dense layer or embedding.
      kind: What makes the kernel's gradient: a convolution, a matrix product or a scatter of rows.
        In transformers the logits share the "tokens" embedding, so a matrix product adds to its
        gradient.
      vectors: Lengths of the further parameters: bias, or those of the normalisation that follows.
      flops: FLOPs of the forward pass per sample; a multiply-add counts 2. An embedding has 0.
      rows: Rows per sample in the product that makes the kernel's gradient: 1, or the length of
        the sequence; 0 for a convolution.
    """

    name: str
    kernel: tuple[int, ...]
    kind: Kind
    vectors: tuple[int, ...]
    flops: float
    rows: int

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return math.prod(self.kernel) + sum(self.vectors)

    def shrunk(self, factor: float) -> Layer:
        """Returns the layer with channels, matrix sides and vectors divided by a factor.

        Windows, the channels of images, and FLOPs stay.

        Args:
          factor: At least 1.
        """
        window, channels = self.kernel[:-2], self.kernel[-2:]
        image = self.kind == "convolution" and channels[0] == IMAGE_CHANNELS
        inputs = channels[0] if image else _divided(channels[0], factor)
        kernel = (*window, inputs, _divided(channels[1], factor))
        return replace(
            self, kernel=kernel, vectors=tuple(_divided(length, factor) for length in self.vectors)
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model as one of the papers trains it.

    Attributes:
      name: Its name in `MODELS`, with "/factor" where it was shrunk.
      layers: Layers with parameters, in the order of the forward pass.
      batch: Samples per device and step.
      throughput: Samples per second of one device that exchanges nothing.
      source: Where batch and throughput come from, and on which device.
    """

    name: str
    layers: tuple[Layer, ...]
    batch: int
    throughput: float
    source: str

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass, per sample of the model before it was shrunk."""
        return sum(layer.flops for layer in self.layers)

    @property
    def step_s(self) -> float:
        """Seconds that one device computes per step, forward and backward."""
        return self.batch / self.throughput

    def times(self) -> tuple[tuple[float, float], ...]:
        """Returns the seconds of each layer's forward and backward pass, together `step_s`.

        The time of a step is spread by FLOPs. The backward pass takes twice as long as the forward
        pass, because it makes two products (for the gradients of kernel and input) where the
        forward pass makes one.
        """
        flop_s = self.step_s / (3 * self.flops)
        return tuple((layer.flops * flop_s, 2 * layer.flops * flop_s) for layer in self.layers)

    def shrunk(self, factor: float) -> Model:
        """Returns a model that stands for this one with less memory: M, N and K are divided.

        Every dimension is divided by the same rule, rounded, and at least 1. Factors have K (M + N)
        elements and matrices M N, so both shrink with the square of `factor` as long as the batch K
        can shrink; rows per sample stay. The step and each layer take as long as before, so
        throughput is divided as the batch is, and FLOPs stay.

        >>> full, quarter = model("vgg19"), model("vgg19").shrunk(4)
        >>> full.batch, quarter.batch, round(full.parameters / quarter.parameters)
        (256, 64, 16)

        Args:
          factor: At least 1.

        Raises:
          ValueError: If `factor` is below 1.
        """
        ranges.check_number("factor", factor, ranges.AT_LEAST_1, "Use 1 for the full size.")
        batch = _divided(self.batch, factor)
        return replace(
            self,
            name=f"{self.name}/{factor:g}",
            layers=tuple(layer.shrunk(factor) for layer in self.layers),
            batch=batch,
            throughput=batch / self.step_s,
        )


def model(name: str) -> Model:
    """Returns the model of a name.

    Args:
      name: One of `MODELS`.

    Raises:
      ValueError: If there is none of that name.
    """
    if name not in MODELS:
        raise ValueError(f"`name` must be one of {', '.join(MODELS)}. Received: name={name!r}")
    return MODELS[name]


def _divided(length: int, factor: float) -> int:
    return max(1, round(length / factor))


def _convolution(name: str, kernel: tuple[int, ...], side: int, *, vectors: int = 1) -> Layer:
    """Returns a layer with an output of `side` x `side`.

    It has as many `vectors`, of one value per channel.
    """
    flops = 2 * math.prod(kernel) * side**2
    lengths = (kernel[-1],) * vectors
    return Layer(name=name, kernel=kernel, kind="convolution", vectors=lengths, flops=flops, rows=0)


def _stem(*shapes: tuple[int, int, int, int]) -> Iterator[Layer]:
    """Yields convolutions of (output side, window, channels in, channels out)."""
    for number, (side, window, inputs, out) in enumerate(shapes, 1):
        yield _convolution(f"convolution{number}", (window, window, inputs, out), side)


def _branches(
    name: str, channels: int, branches: str, side: int, last: int = 0, vectors: int = 1
) -> Generator[Layer, None, int]:
    """Yields convolutions from one input of `channels`, in branches.

    "1x1x64 | 1x1x96 3x3x128+1x1x8" has two branches. A step is height x width x channels out; "+"
    sets two side by side. Outputs are `side` x `side`, at the end of a branch `last` x `last`.

    Returns:
      The number of channels at the ends of all branches together.
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


def _dense(
    name: str, inputs: int, outputs: int, *, rows: int = 1, vectors: int = 1, more: float = 0
) -> Layer:
    """Returns a layer with `vectors` vectors of one value per output.

    `more` are the FLOPs of products without a kernel.
    """
    flops = 2 * inputs * outputs * rows + more
    lengths = (outputs,) * vectors
    return Layer(
        name=name, kernel=(inputs, outputs), kind="dense", vectors=lengths, flops=flops, rows=rows
    )


def _classifier(*widths: int) -> Iterator[Layer]:
    for number, (inputs, outputs) in enumerate(pairwise(widths), 1):
        yield _dense(f"dense{number}", inputs, outputs)


def _alexnet() -> Iterator[Layer]:
    """Krizhevsky et al. 2012: the second, fourth and fifth convolution have two groups."""
    grouped = (27, 5, 48, 256), (13, 3, 256, 384), (13, 3, 192, 384), (13, 3, 192, 256)
    yield from _stem((55, 11, IMAGE_CHANNELS, 96), *grouped)
    yield from _classifier(6 * 6 * 256, 4096, 4096, 1000)


def _vgg19(classes: int) -> Iterator[Layer]:
    """Simonyan and Zisserman 2015, Table 1, E."""
    channels = IMAGE_CHANNELS
    for stage, (count, width) in enumerate(((2, 64), (2, 128), (4, 256), (4, 512), (4, 512))):
        channels = yield from _branches(
            f"stage{stage + 1}", channels, f" 3x3x{width}" * count, 224 >> stage
        )
    yield from _classifier(7 * 7 * channels, 4096, 4096, classes)


def _resnet(*blocks: int) -> Iterator[Layer]:
    """He et al. 2016, Table 1.

    Each convolution is normalised, and the stride of a stage is in its first 1 x 1 convolution.
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


def _googlenet() -> Iterator[Layer]:
    """Szegedy et al. 2015, Table 1; its two auxiliary heads would add 6,379,728 parameters."""
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


def _inception_v3() -> Iterator[Layer]:
    """Szegedy et al. 2016 at 299 x 299, as in Keras: no gamma, and no auxiliary head."""
    first = (149, 3, IMAGE_CHANNELS, 32)
    yield from _stem(first, (147, 3, 32, 32), (147, 3, 32, 64), (73, 1, 64, 80), (71, 3, 80, 192))
    channels = 192
    for index, (side, last, branches) in enumerate(INCEPTION_V3):
        pooled = channels if last < side else 0
        channels = pooled + (yield from _branches(f"mixed{index}", channels, branches, side, last))
    yield from _classifier(channels, 1000)


def _embedding(name: str, entries: int, width: int, length: int, *, vectors: int = 0) -> Layer:
    lengths = (width,) * vectors
    return Layer(
        name=name, kernel=(entries, width), kind="embedding", vectors=lengths, flops=0, rows=length
    )


PROJECTIONS = ("query", "key", "value", "output")


def _transformer(
    blocks: dict[str, int], *, width: int, tokens: int, length: int, positions: int = 0
) -> Iterator[Layer]:
    """Yields blocks of so many attentions and a feed-forward part each.

    The matrix that embeds `tokens` makes the logits, too. Learned `positions` come with biases in
    the attention, as in BERT. Of the products without a kernel of their own, the FLOPs of the
    scores (4 length^2 width) are spread evenly over the four projections of an attention, and those
    of the logits are at the last layer, where their time passes.
    """
    yield _embedding("tokens", tokens, width, length)
    if positions:
        yield _embedding("positions", positions, width, length, vectors=2)
    for block, attentions in blocks.items():
        for attention, (index, projection) in product(range(attentions), enumerate(PROJECTIONS)):
            name = f"{block}/attention{attention + 1}/{projection}"
            # Its bias, and after the last one the layer normalisation.
            vectors = (positions > 0) + 2 * (index == len(PROJECTIONS) - 1)
            yield _dense(name, width, width, rows=length, vectors=vectors, more=length**2 * width)
        yield _dense(f"{block}/inner", width, 4 * width, rows=length)
        logits = 2 * length * width * tokens if block == list(blocks)[-1] else 0
        yield _dense(f"{block}/outer", 4 * width, width, rows=length, vectors=3, more=logits)


# Vaswani et al. 2017, base, and BERT-base (Devlin et al. 2019) without its pooler and segment
# embedding. The latter stands for CommLib's Transformer, of which the paper tells only the 110 M
# parameters and the 256 words.
BASE = {f"encoder{number}": 1 for number in range(1, 7)} | {
    f"decoder{number}": 2 for number in range(1, 7)
}
BERT = {f"encoder{number}": 1 for number in range(1, 13)}

POSEIDON = "Poseidon (Zhang et al. 2017), section 5.1 and Table 3; Titan X"
COMMLIB = "CommLib (Shi et al. 2021), section 5.5; V100, mixed precision"
THEANO_MPI = (
    "Theano-MPI (Ma et al. 2016), Table 3: 5,120 images in 31.2 s on one K20m (it seems), 3.90 s "
    "on eight"
)
VASWANI = (
    "Vaswani et al. 2017, section 5: 25,000 tokens in 0.4 s on eight P100, exchange included; in "
    "sentences of 25"
)
NO_BATCH = (
    "the batch is not told: 8 explains Table 3, given the exposed time per parameter of VGG-19 and "
    "ResNet-50"
)


def _model(name: str, layers: Iterator[Layer], batch: int, throughput: float, source: str) -> Model:
    return Model(name=name, layers=tuple(layers), batch=batch, throughput=throughput, source=source)


def _models() -> Iterator[Model]:
    yield _model("alexnet", _alexnet(), 128, 5120 / 31.2, THEANO_MPI)
    yield _model("googlenet", _googlenet(), 128, 257, f"{POSEIDON}, Caffe")
    inception = _model("inception_v3", _inception_v3(), 32, 43.2, f"{POSEIDON}, TensorFlow")
    yield inception
    vgg19 = _model("vgg19", _vgg19(1000), 256, 560, COMMLIB)
    yield vgg19
    yield replace(
        vgg19, name="vgg19_32", batch=32, throughput=38.5, source=f"{POSEIDON}, TensorFlow"
    )
    yield _model(
        "vgg19_22k",
        _vgg19(21_841),
        32,
        34.8,
        f"{POSEIDON}, TensorFlow unmodified (34.5 under Poseidon)",
    )
    resnet50 = _model("resnet50", _resnet(3, 4, 6, 3), 256, 1150, f"{COMMLIB}, 224 x 224")
    yield resnet50
    yield replace(
        resnet50, name="resnet50_96", throughput=4400, source=f"{COMMLIB}, Table 4, 96 x 96"
    )
    source = (
        "Not published: inception_v3's throughput scaled by FLOPs; batch of Poseidon, section 5.1"
    )
    resnet152 = _model("resnet152", _resnet(3, 8, 36, 3), 32, inception.throughput, source)
    yield replace(resnet152, throughput=inception.throughput * inception.flops / resnet152.flops)
    base = _transformer(BASE, width=512, tokens=37_000, length=25)
    yield _model("transformer_base", base, 125, 125 / 0.4, VASWANI)
    bert = _transformer(BERT, width=768, tokens=30_522, length=256, positions=512)
    yield _model("transformer_110m", bert, 8, 32, f"{COMMLIB}; {NO_BATCH}")


MODELS: dict[str, Model] = {found.name: found for found in _models()}
