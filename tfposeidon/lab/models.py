"""Models as the papers train them: layers, batch sizes and single-device throughput."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tfposeidon import ranges
from tfposeidon.lab import architectures
from tfposeidon.lab.architectures import Layer


@dataclass(frozen=True, kw_only=True)
class Model:
    """Model as one of the papers trains it, named as in `MODELS`, plus "/factor" if it was shrunk.

    `layers` are those with parameters, in the order of the forward pass. `batch` is the samples per
    device and step, and `throughput` the samples per second of one device without communication.
    `source` names the source of both, and the device.
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
        """Seconds of computation per step on one device, forward and backward."""
        return self.batch / self.throughput

    def times(self) -> tuple[tuple[float, float], ...]:
        """Returns the seconds of each layer's forward and backward pass; their sum is `step_s`."""
        # The step time is distributed by FLOPs. A backward pass takes twice as long as a forward
        # pass, because it computes two products (for the gradients of kernel and input) instead of
        # one.
        flop_s = self.step_s / (3 * self.flops)
        return tuple((layer.flops * flop_s, 2 * layer.flops * flop_s) for layer in self.layers)

    def shrunk(self, factor: float) -> Model:
        """Returns a model that represents this one with less memory: M, N and K are divided.

        Each dimension is divided by `factor`, rounded, and at least 1. Factors have K (M + N)
        elements and matrices M N, so both shrink with the square of `factor` as long as the batch K
        can shrink; rows per sample do not change. Step and layer times do not change either, so
        throughput shrinks with the batch, and FLOPs stay as they are.

        >>> full, quarter = model("vgg19"), model("vgg19").shrunk(4)
        >>> full.batch, quarter.batch, round(full.parameters / quarter.parameters)
        (256, 64, 16)
        """
        ranges.check_number("factor", factor, ranges.AT_LEAST_1, "Use 1 for the full size.")
        batch = architectures.divided(self.batch, factor)
        return replace(
            self,
            name=f"{self.name}/{factor:g}",
            layers=tuple(layer.shrunk(factor) for layer in self.layers),
            batch=batch,
            throughput=batch / self.step_s,
        )


def model(name: str) -> Model:
    """Returns the model of this name, one of `MODELS`."""
    if name not in MODELS:
        raise ValueError(f"`name` must be one of {', '.join(MODELS)}. Received: name={name!r}")
    return MODELS[name]


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
    "no batch is published: 8 explains Table 3, given the exposed time per parameter of VGG-19 and "
    "ResNet-50"
)


def _model(name: str, layers: Iterator[Layer], batch: int, throughput: float, source: str) -> Model:
    return Model(name=name, layers=tuple(layers), batch=batch, throughput=throughput, source=source)


def _models() -> Iterator[Model]:
    yield _model("alexnet", architectures.alexnet(), 128, 5120 / 31.2, THEANO_MPI)
    yield _model("googlenet", architectures.googlenet(), 128, 257, f"{POSEIDON}, Caffe")
    inception = _model(
        "inception_v3", architectures.inception_v3(), 32, 43.2, f"{POSEIDON}, TensorFlow"
    )
    yield inception
    vgg19 = _model("vgg19", architectures.vgg19(1000), 256, 560, COMMLIB)
    yield vgg19
    yield replace(
        vgg19, name="vgg19_32", batch=32, throughput=38.5, source=f"{POSEIDON}, TensorFlow"
    )
    yield _model(
        "vgg19_22k",
        architectures.vgg19(21_841),
        32,
        34.8,
        f"{POSEIDON}, TensorFlow unmodified (34.5 under Poseidon)",
    )
    resnet50 = _model(
        "resnet50", architectures.resnet(3, 4, 6, 3), 256, 1150, f"{COMMLIB}, 224 x 224"
    )
    yield resnet50
    yield replace(
        resnet50, name="resnet50_96", throughput=4400, source=f"{COMMLIB}, Table 4, 96 x 96"
    )
    source = (
        "Not published: inception_v3's throughput scaled by FLOPs; batch of Poseidon, section 5.1"
    )
    resnet152 = _model(
        "resnet152", architectures.resnet(3, 8, 36, 3), 32, inception.throughput, source
    )
    yield replace(resnet152, throughput=inception.throughput * inception.flops / resnet152.flops)
    base = architectures.transformer(architectures.BASE, width=512, tokens=37_000, length=25)
    yield _model("transformer_base", base, 125, 125 / 0.4, VASWANI)
    bert = architectures.transformer(
        architectures.BERT, width=768, tokens=30_522, length=256, positions=512
    )
    yield _model("transformer_110m", bert, 8, 32, f"{COMMLIB}; {NO_BATCH}")


MODELS: dict[str, Model] = {found.name: found for found in _models()}
