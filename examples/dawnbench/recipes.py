"""Models, phases and learning rates of the record run, and of a small run."""

from dataclasses import dataclass, replace

import tfposeidon as tp
from keras_callbacks import Phase


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A model and its hyperparameters.

    Attributes:
      phases: Resolutions, batches and epochs.
      model: Arguments of `resnet`, except for the classes.
      peak_rate: Learning rate of LARS after the warm-up, for a global batch of `rate_batch`.
      sgd_rate: The same for SGD, if it replaces LARS.
      rate_batch: Global batch size of `peak_rate`; the rate is proportional to the batch size.
      warmup_epochs: Epochs in which the rate increases to its peak.
      power: Exponent of the decay after the warm-up.
      momentum: Momentum of LARS.
      weight_decay: Weight decay, which excludes normalization and biases.
      smoothing: Label smoothing.
      top: k of the top-k accuracy.
      target: Top-k accuracy at which the time is reported.
    """

    phases: tuple[Phase, ...]
    model: dict
    peak_rate: float
    sgd_rate: float
    rate_batch: int
    warmup_epochs: float
    power: float = 2.0
    momentum: float = 0.9
    weight_decay: float = 5e-5
    smoothing: float = 0.1
    top: int = 5
    target: float = 0.93

    @property
    def epochs(self):
        """Epochs of all phases together."""
        return sum(phase.epochs for phase in self.phases)

    def __str__(self):
        """Returns the hyperparameters that no option changes, as a sentence."""
        return (
            f"the rate of LARS rises in {self.warmup_epochs:g} epochs to {self.peak_rate:g} for "
            f"{self.rate_batch} images per step (SGD: to {self.sgd_rate:g}), proportional to the "
            f"batch, and decays to 0 with power {self.power:g}; momentum "
            f"{self.momentum:g}, weight decay {self.weight_decay:g}, label smoothing "
            f"{self.smoothing:g}; the target is {100 * self.target:g} % top-{self.top}"
        )

    def rate_at(self, epoch, ranks):
        """Returns the learning rate for the batch of the first phase.

        Args:
          epoch: Fractional epoch.
          ranks: Number of ranks.
        """
        peak = self.peak_rate * self.phases[0].batch * ranks / self.rate_batch
        if epoch < self.warmup_epochs:
            return peak * epoch / self.warmup_epochs
        left = (self.epochs - epoch) / (self.epochs - self.warmup_epochs)
        return peak * max(0.0, left) ** self.power


SCHEDULES = {
    # Scheme of the first phase, and of all others.
    "paper": (
        tp.schemes.HiTopK(density=0.01, wire_dtype="float16"),
        tp.schemes.Torus2D(wire_dtype="float16"),
    ),
    "torus2d": ("torus2d", "torus2d"),
    "allreduce": ("allreduce", "allreduce"),
    "allreduce16": (
        tp.schemes.AllReduce(wire_dtype="float16"),
        tp.schemes.AllReduce(wire_dtype="float16"),
    ),
    "hitopk": ("hitopk", "hitopk"),
    "auto": ("auto", "auto"),
}
"""Schemes by the name of a schedule; those of "paper" are from section 5.6 of CommLib."""

RECIPES = {
    # From section 5.6 and table 4 of CommLib; rates are those of MLPerf for batches of 32 K.
    "paper": Recipe(
        phases=(
            Phase(epochs=13, size=96, batch=256),
            Phase(epochs=11, size=128, batch=256),
            Phase(epochs=3, size=224, batch=256),
            Phase(epochs=1, size=288, batch=128),
        ),
        model={"blocks": (3, 4, 6, 3), "width": 64},
        peak_rate=29.0,
        sgd_rate=12.8,  # 0.1 for a batch of 256
        rate_batch=32768,
        warmup_epochs=5.0,
    ),
    "tiny": Recipe(
        phases=(
            Phase(epochs=8, size=24, batch=16),
            Phase(epochs=6, size=30, batch=16),
            Phase(epochs=3, size=38, batch=16),
            Phase(epochs=1, size=46, batch=8),
        ),
        model={"blocks": (1, 1, 1), "width": 16, "bottleneck": False, "large_stem": False},
        peak_rate=6.0,
        sgd_rate=0.2,
        rate_batch=64,
        warmup_epochs=2.0,
        power=1.0,
        top=1,
    ),
}


def recipe(preset, schedule, shortest=False, without=()):
    """Returns a recipe, with the schemes of a schedule in its phases.

    Args:
      preset: Name in `RECIPES`.
      schedule: Name in `SCHEDULES`.
      shortest: True for one epoch in each phase, and for a target that any model reaches.
      without: Parts to omit. Without "resizing", all phases train at the last resolution; without
        "lars", SGD trains; without "sparse", the first phase uses the scheme of the others.
    """
    found, (first, later) = RECIPES[preset], SCHEDULES[schedule]
    phases = [replace(phase, scheme=later) for phase in found.phases]
    if shortest:
        phases = [replace(phase, epochs=1) for phase in phases]
        found = replace(found, warmup_epochs=1.0, target=0.0)
    if "resizing" in without:
        phases = [replace(phase, size=phases[-1].size) for phase in phases]
    if "sparse" in without:
        first = later
    if "lars" in without:
        found = replace(found, peak_rate=found.sgd_rate)
    return replace(found, phases=(replace(phases[0], scheme=first), *phases[1:]))
