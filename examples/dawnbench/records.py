"""The clock of the run, a line of JSON for each epoch, and the plot of both."""

import importlib.util
import json
import time

import keras
from typing_extensions import override

import tfposeidon as tp


class Records(keras.callbacks.Callback):
    """Keeps the time of training, and writes a line of JSON after each epoch.

    Time is counted as DAWNBench does: from the begin of the first epoch to the end of one, with
    what lies between phases, and without evaluation. A resumed run goes on with the time of the
    last line that its snapshot has seen: what was trained of an epoch before the snapshot counts
    nowhere, and lines tell of how many epochs that holds. Rank 0 writes; give the callback to all
    ranks.

    Args:
      path: File of the lines.
      resize: The `ProgressiveResize` of the run.
      metric: Name of the accuracy in the logs, such as "val_accuracy".
      target: Accuracy at which the time is told.
    """

    def __init__(self, path, resize, metric, target):
        super().__init__()
        self.path, self.resize, self.metric, self.target = path, resize, metric, target
        self.lines, self._evaluated_s, self._begin_s = [], 0.0, None
        self._before_s, self._interrupted = 0.0, 0

    @property
    def reached(self):
        """The first line whose accuracy is the target or more; `None` so far."""
        return next((one for one in self.lines if one[self.metric] >= self.target), None)

    def resume(self, epoch):
        """Drops the lines of epochs that are trained again.

        Args:
          epoch: Index of the epoch to go on with; 0 for a new run.
        """
        was_begun = self.path.exists()
        kept = self.path.read_text().splitlines() if was_begun else []
        self.lines = [line for line in map(json.loads, kept) if line["epoch"] < epoch]
        self._before_s = self.lines[-1]["seconds"] if self.lines else 0.0
        if was_begun:
            self._interrupted = 1 + (self.lines[-1]["interrupted"] if self.lines else 0)
        self._write()

    def interruptions(self, line):
        """Returns a text on the interruptions before a line; nothing without any."""
        count = line["interrupted"]
        return f"; interrupted in {count} epoch(s), whose lost time is excluded" if count else ""

    @override
    def on_epoch_begin(self, epoch, logs=None):
        # Not before the first batch: callbacks with hooks for batches of their own make all ranks
        # watch for one that ends an epoch early.
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
            print(self._told(self.lines[-1]), flush=True)

    def _told(self, line):
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
        # Beside and renamed: a kill leaves the old lines or the new ones.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text("".join(f"{json.dumps(line)}\n" for line in self.lines))
        part.replace(self.path)


def plot(records, path):
    """Draws accuracy over the time of training, with the phases behind it.

    Args:
      records: The `Records` of a run.
      path: File of the picture.
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
