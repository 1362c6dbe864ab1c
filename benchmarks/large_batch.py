"""Compares accuracy with large batches: LARS and LAMB with warm-up, and SGD, on digits.

    python -m benchmarks.large_batch          # short: one seed
    python -m benchmarks.large_batch --full   # three seeds; 4 minutes

One process trains a CNN for the same number of epochs with a batch size of 16, and of 256 by
several optimizers: SGD at 2, 4, 8 and 16 times the learning rate of the small batch, LARS and LAMB.
16 ranks with a batch size of 16 produce the same result, up to rounding
(tests/optimizers/test_layer_rates.py). An interrupted run resumes.
"""

import statistics

import keras
import numpy as np

from benchmarks import figures, harness
from benchmarks.workers.accuracy import MOMENTUM, data, model
from tfposeidon.optimizers import LAMB, LARS
from tfposeidon.optimizers.schedules import PolynomialDecayWithWarmup

SMALL, FACTOR, EPOCHS, WARMUP = 16, 16, 40, 5
RATE = 0.05


def schedule(peak, batch, samples, epochs, warmup=WARMUP):
    """Returns a learning rate that rises to the peak, and decays to 0 at the last step.

    Args:
      peak: Highest learning rate.
      batch: Samples per step.
      samples: Samples per epoch.
      epochs: Number of epochs in all.
      warmup: Epochs in which the learning rate rises.
    """
    steps = -(-samples // batch)
    return PolynomialDecayWithWarmup.by_epochs(peak, warmup, epochs - warmup, steps, power=2.0)


def _sgd(rate):
    return keras.optimizers.SGD(rate, MOMENTUM)


RULES = {
    # Name -> batch size, and function that creates the optimizer with a function for schedules.
    "SGD, small batch": (SMALL, lambda rate: _sgd(rate(RATE, warmup=0))),
    "SGD, scaled rate": (SMALL * FACTOR, lambda rate: _sgd(rate(RATE * FACTOR, warmup=0))),
    **{
        f"SGD, {factor} x rate and warm-up": (
            SMALL * FACTOR,
            lambda rate, f=factor: _sgd(rate(RATE * f)),
        )
        for factor in (2, 4, 8)
    },
    "SGD, scaled rate and warm-up": (SMALL * FACTOR, lambda rate: _sgd(rate(RATE * FACTOR))),
    "LARS": (
        SMALL * FACTOR,
        lambda rate: LARS(rate(0.2), MOMENTUM, trust_coefficient=0.1, weight_decay=1e-4),
    ),
    "LAMB": (SMALL * FACTOR, lambda rate: LAMB(rate(0.02), weight_decay=1e-4)),
}
COMMON = {"rules": list(RULES), "epochs": EPOCHS}
SHORT, FULL = COMMON | {"seeds": [0]}, COMMON | {"seeds": [0, 1, 2]}
SMALLEST = {
    "rules": ["SGD, small batch", "SGD, 2 x rate and warm-up", "LARS"],
    "epochs": 6,
    "seeds": [0],
}


def parse_arguments():
    parser = harness.argument_parser("large_batch", __doc__)
    parser.add_argument("--rules", nargs="*", choices=RULES, help="rules to train with")
    parser.add_argument("--seeds", nargs="*", type=int, help="seeds of weights and batches")
    return harness.parse(parser, SHORT, FULL, SMALLEST)


def planned(options):
    """Returns one job per configuration and seed."""
    more = {} if options.epochs == EPOCHS else {"epochs": options.epochs}
    return harness.keyed(
        {"rule": rule, "seed": seed} | more for seed in options.seeds for rule in options.rules
    )


def run(rule, seed, epochs=EPOCHS):
    """Trains one configuration; the answer has the validation accuracy after each epoch."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    batch, optimizer = RULES[rule]
    (x, y), validation = data(0, 1)
    network = model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(
        optimizer(lambda *a, **k: schedule(*a, batch, len(x), epochs, **k)),
        loss,
        metrics=["accuracy"],
    )
    fitted = network.fit(
        x, y, batch_size=batch, epochs=epochs, validation_data=validation, verbose=0
    )
    accuracies = [float(accuracy) for accuracy in fitted.history["val_accuracy"]]
    print(f"    {accuracies[-1]:.2%}")
    return {"rule": rule, "seed": seed, "batch": batch, "accuracies": accuracies}


def runs_of(cells, rule):
    """Returns the answers of a configuration, one per seed."""
    return [cell for cell in cells.values() if cell["rule"] == rule]


def show(cells):
    """Prints the final accuracy, and its difference from the small batch."""
    print(
        f"\nscikit-learn's digits, {EPOCHS} epochs; final validation accuracy, "
        "mean over seeds (lowest, highest)"
    )
    small = [cell["accuracies"][-1] for cell in runs_of(cells, "SGD, small batch")]
    rows = [("rule", "batch", "seeds", "accuracy", "points below the small batch")]
    for rule in RULES:
        last = [cell["accuracies"][-1] for cell in runs_of(cells, rule)]
        if last:
            below = f"{100 * (statistics.mean(small) - statistics.mean(last)):.2f}" if small else ""
            spread = f"{statistics.mean(last):.2%} ({min(last):.2%}, {max(last):.2%})"
            rows.append((rule, str(RULES[rule][0]), str(len(last)), spread, below))
    harness.show(rows)


LOWEST = 80
"""Lower end of the axis, in percent."""


def plot(cells, path):
    """Plots validation accuracy over epochs: mean and range over seeds."""

    def draw(figure, axes):
        below = []
        for rule in RULES:
            curves = 100 * np.array([cell["accuracies"] for cell in runs_of(cells, rule)])
            if not curves.size:
                continue
            if curves.max() < LOWEST:
                below.append(f"{rule}: {curves[:, -1].mean():.0f} %")
                continue
            epochs = range(1, curves.shape[1] + 1)
            style = figures.line(rule) | {"marker": "", "label": named(rule)}
            axes[0].plot(epochs, curves.mean(0), **style)
            axes[0].fill_between(
                epochs, curves.min(0), curves.max(0), color=style["color"], alpha=0.12, linewidth=0
            )
        axes[0].set(xlabel="epoch", ylabel="validation accuracy, %", ylim=(LOWEST, 100.5))
        axes[0].grid(axis="y")
        if below:
            text = "below the axis: " + "; ".join(below)
            axes[0].annotate(text, (0.99, 0.02), xycoords="axes fraction", ha="right", fontsize=9)
        figures.legend(
            figure,
            columns=3,
            more=[named(rule) for rule in RULES if figures.style(rule).ours],
            title="rule (batch); bold: tfposeidon; lines: mean of the seeds; bands: their range",
        )

    figures.save(path, 1, draw, height_in=4.4)


def named(rule):
    """Returns the label of a configuration, with its batch size."""
    return f"{rule} ({RULES[rule][0]})"


def main():
    options = parse_arguments()
    harness.carry_out(options, planned(options), run, show, plot)


if __name__ == "__main__":
    main()
