"""Measures training time, writes a line of JSON after each epoch, and plots the accuracy."""

import importlib.util
import json
import time

import keras
from typing_extensions import override

import tfposeidon as tp


class Records(keras.callbacks.Callback):
    """Measures the time of training, and writes a line of JSON after each epoch.

    Time is counted as in DAWNBench: from the start of the first epoch to the end of an epoch, with
    the time between phases and without evaluation. A resumed run continues with the time of the
    last epoch that its snapshot contains completely. Steps of an unfinished epoch before the
    snapshot are not counted; `interrupted` in a line is the number of such epochs. Rank 0 writes;
    all ranks need the callback.

    Args:
      path: File of the lines.
      resize: The `ProgressiveResize` of the run.
      metric: Name of the accuracy in the logs, such as "val_accuracy".
      target: Accuracy at which the time is reported.
    """

    def __init__(self, path, resize, metric, target):
        super().__init__()
        self.path, self.resize, self.metric, self.target = path, resize, metric, target
        self.lines, self._evaluated_s, self._begin_s = [], 0.0, None
        self._before_s, self._interrupted = 0.0, 0

    @property
    def reached(self):
        """The first line whose accuracy reaches the target, or `None`."""
        return next((one for one in self.lines if one[self.metric] >= self.target), None)

    def resume(self, epoch):
        """Drops the lines of epochs that are trained again.

        Args:
          epoch: Index of the epoch at which training resumes; 0 for a new run.
        """
        is_resumed = self.path.exists()
        written = self.path.read_text().splitlines() if is_resumed else []
        self.lines = [line for line in map(json.loads, written) if line["epoch"] < epoch]
        self._before_s = self.lines[-1]["seconds"] if self.lines else 0.0
        if is_resumed:
            self._interrupted = 1 + (self.lines[-1]["interrupted"] if self.lines else 0)
        self._write()

    def interruptions(self, line):
        """Describes the interruptions before a line; returns an empty string if there were none."""
        count = line["interrupted"]
        return f"; interrupted in {count} epoch(s), whose lost time is excluded" if count else ""

    @override
    def on_epoch_begin(self, epoch, logs=None):
        # Define no batch hook: with one, all ranks check at each step whether a rank stops early.
        if self._begin_s is None:
            self._begin_s = time.perf_counter()

    @override
    def on_test_begin(self, logs=None):
        self._test_begin_s = time.perf_counter()

    @override
    def on_test_end(self, logs=None):
        self._evaluated_s += time.perf_counter() - self._test_begin_s

    @override
    def on_epoch_end(self, epoch, logs=None):
        trained_s = time.perf_counter() - self._begin_s - self._evaluated_s
        phase = self.resize.phase_at(epoch)
        line = {"epoch": epoch, "seconds": self._before_s + trained_s}
        line |= {"pixels": phase.size, "batch": phase.batch * tp.size()}
        line |= {
            "scheme": str(tp.unwrap(self.model.optimizer).policy),
            "interrupted": self._interrupted,
        }
        self.lines.append(line | {name: float(value) for name, value in (logs or {}).items()})
        if tp.rank() == 0:
            self._write()
            print(self._description(self.lines[-1]), flush=True)

    def _description(self, line):
        accuracy = f"{100 * line[self.metric]:.2f} %"
        if line is self.reached:
            accuracy += f": the target of {100 * self.target:g} % is reached"
        return (
            f"epoch {line['epoch'] + 1} of {self.resize.phases[-1].end_epoch}: "
            f"{line['seconds']:.1f} s of training, {line['pixels']} pixels, {accuracy}"
        )

    def _write(self):
        if tp.rank() != 0:
            return
        # Rename the complete file, so that a killed process leaves either the old or the new lines.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text("".join(f"{json.dumps(line)}\n" for line in self.lines))
        part.replace(self.path)


def plot(records, path):
    """Plots accuracy over the time of training, with the phases in the background.

    Args:
      records: The `Records` of a run.
      path: File of the plot.
    """
    if not importlib.util.find_spec("matplotlib"):
        print("the plot was skipped: Matplotlib is missing. Run: pip install matplotlib")
        return
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    seconds = [line["seconds"] for line in records.lines]
    begin = 0.0
    for number, phase in enumerate(records.resize.phases):
        own = [line for line in records.lines if records.resize.phase_at(line["epoch"]) is phase]
        if own:
            axis.axvspan(begin, own[-1]["seconds"], color="0.93" if number % 2 else "0.97")
            axis.text(
                (begin + own[-1]["seconds"]) / 2,
                0.02,
                f"{phase.size} px",
                ha="center",
                transform=axis.get_xaxis_transform(),
            )
            begin = own[-1]["seconds"]
    axis.plot(seconds, [100 * line[records.metric] for line in records.lines], "o-", ms=4)
    axis.axhline(100 * records.target, color="black", lw=1, ls="--")
    axis.annotate(
        f"target: {100 * records.target:g} %", (0, 100 * records.target), va="bottom", fontsize=9
    )
    axis.set(xlabel="seconds of training", ylabel="accuracy on test images (%)", ylim=(0, 101))
    figure.savefig(path, dpi=150)
    plt.close(figure)
