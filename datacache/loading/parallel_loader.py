"""Loads batches in parallel: a separate process prepares the next batches during training."""

from __future__ import annotations

import itertools
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from datacache.from_tfposeidon import check_integer
from datacache.loading.loader_process import END_S, FAILED, Load, LoaderProcess, shared_arrays

REMEDIES = {
    1: "The process has printed the cause. It imports `load` from its module, and the main "
    'script, which must start its work under `if __name__ == "__main__":`.',
    -signal.SIGKILL: "If no user killed the process, memory ran out: load smaller batches, or use "
    "fewer `buffers`.",
}
"""Remedies by exit code of the loader process."""


class LoaderError(RuntimeError):
    """Raised if a batch cannot be loaded, or the loader process has ended."""


class ParallelLoader:
    """Loads batches ahead of training in a separate process.

    The process calls `load` for the items of a pass in order, and writes each batch to one of a few
    buffers of shared memory. The training process copies the batch from there. With `views`,
    batches are not copied: a request for the next batch releases the buffer of the previous batch
    for the loader. The process is spawned and imports `load`, so a training script must start
    its work under `if __name__ == "__main__":`. The process ends with the training process, even if
    the training process is killed, and its memory leaves no files in `/dev/shm`.

    A loader supports one thread at a time. Concurrent passes need one loader each.

    Args:
      load: `load(mode, item)` returns an array, or a list or tuple of arrays, of any shapes and of
        dtypes without objects. It must be picklable, should not use accelerators, and must not
        start processes with `multiprocessing`.
      buffers: Number of buffers, each as large as the largest batch. The loader is up to
        `buffers - 1` batches ahead.
      views: True to yield views of the buffers, which saves the copy. A batch is then valid until
        the next one is requested. `fit` and `tf.data` request batches ahead of training, so use
        views only in a loop that trains on a batch before it requests the next.

    Raises:
      ValueError: If `buffers` is less than 2.

    Cost: two copies of each batch (one with `views`), and about 0.2 ms for messages per batch.

    Source: Ma, Mao and Taylor 2016, section 3.3, Algorithm 1. Differs: batches stay in host memory,
    where the paper's loader copies them to the GPU through a second buffer (steps 19 and 25); a
    spawned process and sockets replace MPI Spawn; filenames are sent `buffers` at a time; labels
    may be loaded as well.

    Example:
      >>> import numpy as np
      >>> load = np.char.add  # Yours reads the file that `item` names, and prepares it for `mode`.
      >>> with ParallelLoader(load) as loader:
      ...     for batch in loader.batches("train on ", ["file 1", "file 2"]):
      ...         print(batch)
      train on file 1
      train on file 2
    """

    def __init__(self, load: Load, buffers: int = 2, views: bool = False) -> None:
        self._buffers = check_integer(
            "buffers",
            buffers,
            2,
            "Use 2 or more: one for the batch in training, and one for the next batch. To load "
            "without prefetching, call `load` directly.",
        )
        self._load, self._views = load, views
        self._child: LoaderProcess | None = None
        self._turn = 0

    def start(self) -> None:
        """Starts the process if it does not run; `batches` calls this.

        Raises:
          TypeError: If `load` cannot be pickled.
        """
        if self._child is None or not self._child.alive:
            self.stop()
            self._child = LoaderProcess(self._load, self._buffers)

    def stop(self) -> None:
        """Ends the process and the current pass, if any; the last batch stays valid.

        A process whose `load` does not return within one second is killed.
        """
        self._turn += 1
        child, self._child = self._child, None
        if child is not None:
            child.stop()

    def __enter__(self) -> ParallelLoader:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def batches(self, mode: str, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the batches of a pass.

        The pass starts with the request for its first batch, and ends any other pass.

        Args:
          mode: First argument of `load`, such as "train" or "validate".
          items: Second arguments of `load`, one for each batch, of any picklable type. At most
            `buffers` of them are consumed ahead, so `items` may be infinite.

        Yields:
          Batches that `load(mode, item)` returns, which may be retained. With `views`, they are
          arrays in shared memory, valid until the next batch of this or another pass is requested.

        Raises:
          LoaderError: If `load` raised an error or cannot be imported, or the process ended. The
            pass has then ended; another pass can start, in this process or a new process.
          RuntimeError: If another pass has started, or `stop` was called, since the last batch.
          TypeError: If an item cannot be pickled.
        """
        self.start()
        self._turn += 1
        turn = self._turn
        requests = zip(itertools.cycle(range(self._buffers)), items, strict=False)
        requested: deque[tuple[int, Any]] = deque()
        wanted = self._buffers
        while True:
            for buffer, item in itertools.islice(requests, wanted):
                self._current_child(turn).request(turn, buffer, mode, item)
                requested.append((buffer, item))
            if not requested:
                break
            yield self._batch(turn, mode, *requested.popleft())
            # The buffer of the last batch is free, as after the paper's handshake (steps 20-27).
            wanted = 1

    def _current_child(self, turn: int) -> LoaderProcess:
        if self._child is None or turn != self._turn:
            raise RuntimeError(
                "A batch must belong to the current pass. Received: a request for a batch of a "
                "pass that `stop` or another pass has ended. Call `batches` again, or use a second "
                "ParallelLoader."
            )
        return self._child

    def _batch(self, turn: int, mode: str, buffer: int, item: Any) -> Any:
        child = self._current_child(turn)
        what = f"mode={mode!r}, item={item!r:.200}"
        try:
            reply = child.reply(turn)
        except (EOFError, OSError):
            code, self._child = child.stop(END_S), None
            remedy = REMEDIES.get(code, "Check the output of the process.")
            raise LoaderError(
                f"The loader process must run until `stop`. Received: exit code {code}, before the "
                f"batch of {what}. {remedy} `batches` starts a new process."
            ) from None
        if reply.rebuild is not None:
            arrays = shared_arrays(child.buffers[buffer], reply.specs)
            return reply.rebuild(arrays if self._views else [array.copy() for array in arrays])
        if reply.turn == FAILED:
            self.stop()
            raise LoaderError(
                "`load` must be importable in another process. Received: "
                f"{reply.error}. Define it at the top level of a module, or of the main script "
                'before `if __name__ == "__main__":`.'
            )
        error = LoaderError(
            f"`load` must return a batch. Received: {reply.error} for {what}. Correct `load`, or "
            "omit the item. The loader continues with the next pass."
        )
        error.add_note(f"In the loader process:\n{reply.trace}")
        raise error


@dataclass(frozen=True, eq=False)
class CropAndMirror:
    """Subtracts the mean from images, and crops and mirrors the images.

    Crops and mirroring are random in training; otherwise the crop is centered.

    Args:
      mean: Mean of the images, `[h, w, c]`, or of their channels, `[c]`.
      size: Height and width of the result in pixels.
      seed: Seed of the random crops and mirroring, not negative.

    Raises:
      ValueError: If the rank of `mean` is neither 3 nor 1, or `size` or `seed` is out of range.

    Cost: one pass over the cropped part of the images, and no memory besides the result.

    Source: Ma, Mao and Taylor 2016, section 3.3, Algorithm 1, steps 17 and 18. Differs: each image
    has its own crop and mirroring, drawn from `seed` and the index of the batch; the paper does not
    specify the draw.

    Example:
      >>> prepare = CropAndMirror(mean=[1.0], size=2)
      >>> prepare(np.arange(16, dtype="uint8").reshape(1, 4, 4, 1), "validate", 0)[0, :, :, 0]
      array([[4., 5.],
             [8., 9.]], dtype=float32)
    """

    mean: Any
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if np.ndim(self.mean) not in (1, 3):
            raise ValueError(
                "`mean` must be of shape [h, w, c] or [c]. Received: mean of shape "
                f"{list(np.shape(self.mean))}. Use [0.0] * c to subtract nothing."
            )
        check_integer("size", self.size, 1, "Pass the model's input size.")
        check_integer("seed", self.seed, 0)

    def __call__(self, images: np.ndarray, mode: str, number: int) -> np.ndarray:
        """Prepares a batch; equal arguments yield bit-identical results.

        Args:
          images: Images, `[n, h, w, c]` of any real dtype.
          mode: "train" for random crops and mirroring; any other value for centered crops.
          number: Index of the batch, not negative; part of the seed. Use a different index for each
            batch and epoch.

        Returns:
          The prepared images, `[n, size, size, c]` float32.

        Raises:
          ValueError: If the images are smaller than `size` or do not match `mean`, or `number` is
            negative.
        """
        mean = np.asarray(self.mean, np.float32)
        self._check(images, mean)
        check_integer("number", number, 0)
        prepared = np.empty((len(images), self.size, self.size, images.shape[3]), np.float32)
        for target, image, (top, left, step) in zip(
            prepared, images, self._draw_crops(images, mode, number), strict=True
        ):
            part = np.s_[top : top + self.size, left : left + self.size]
            # Combine steps 17 and 18: crop the mean like the image, so that only the crop is
            # subtracted, and write the columns backwards to mirror.
            np.subtract(
                image[part],
                mean if mean.ndim == 1 else mean[part],
                out=target[:, ::step],
                casting="same_kind",
            )
        return prepared

    def _draw_crops(self, images: np.ndarray, mode: str, number: int) -> np.ndarray:
        """Returns top, left and the step of columns (-1 mirrors) of each image, `[n, 3]` int64."""
        count, *sizes = images.shape[:3]
        spare = np.array(sizes) - self.size
        if mode != "train":
            return np.tile([*spare // 2, 1], (count, 1))
        draw = np.random.default_rng([self.seed, number])
        return np.column_stack(
            [draw.integers(0, spare + 1, (count, 2)), 1 - 2 * draw.integers(0, 2, count)]
        )

    def _check(self, images: np.ndarray, mean: np.ndarray) -> None:
        is_large_enough = images.ndim == 4 and min(images.shape[1:3]) >= self.size
        if not is_large_enough or mean.shape not in (images.shape[1:], images.shape[3:]):
            raise ValueError(
                "Images must be of shape [n, h, w, c], with h and w at least `size`, and `mean` "
                f"must have the shape of an image or of its channels. Received: size={self.size}, "
                f"mean of shape {list(mean.shape)}, images of shape {list(images.shape)}. Pass "
                "larger images, a smaller `size`, or the mean of such images."
            )
