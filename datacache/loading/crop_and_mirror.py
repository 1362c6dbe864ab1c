"""What the loading process of Theano-MPI does to images: subtract the mean, crop, mirror."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class CropAndMirror:
    """Subtracts the mean and crops: at random, with random mirroring, to train, and otherwise in the centre.

        >>> import numpy as np
        >>> prepare = CropAndMirror(mean=[1.0], size=2)
        >>> prepare(np.arange(16, dtype="uint8").reshape(1, 4, 4, 1), "validate", 0)[0, :, :, 0]
        array([[4., 5.],
               [8., 9.]], dtype=float32)

    Attributes:
      mean: Of the images, `[h, w, c]`, or of their channels, `[c]`.
      size: Height and width of the result.
      seed: Other seeds draw other crops.

    Raises:
      ValueError: If `mean` has another rank, or `size` or `seed` is out of range.

    Cost: one pass over the part of the images that is kept; it needs no memory but the result.

    Source: Ma, Mao and Taylor 2016, section 3.3, Algorithm 1, steps 17 and 18. Differs: each image has a crop and a
    mirroring of its own, drawn from (seed, number), where the paper does not say how they are drawn.
    """

    mean: Any
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if np.ndim(self.mean) not in (1, 3):
            raise ValueError(
                f"`mean` must be of shape [h, w, c] or [c]. Received: mean of shape {list(np.shape(self.mean))}. "
                "Use [0.0] * c to subtract nothing."
            )
        if self.size < 1:
            raise ValueError(
                f"`size` must be at least 1. Received: size={self.size}. Give the model's input size."
            )
        _check_not_negative("seed", self.seed)

    def __call__(self, images: np.ndarray, mode: str, number: int) -> np.ndarray:
        """The prepared batch; the same arguments give the same bits.

        Args:
          images: `[n, h, w, c]` of any numbers.
          mode: "train" for random crops and mirroring; any other word for the centre.
          number: Of the batch, for the draw: one that differs between batches and epochs.

        Returns:
          `[n, size, size, c]` float32.

        Raises:
          ValueError: If the images are smaller than `size` or do not match `mean`, or `number` is negative.
        """
        mean = np.asarray(self.mean, np.float32)
        self._check(images, mean)
        _check_not_negative("number", number)
        prepared = np.empty((len(images), self.size, self.size, images.shape[3]), np.float32)
        for target, image, (top, left, step) in zip(
            prepared, images, self._places(images, mode, number), strict=True
        ):
            part = np.s_[top : top + self.size, left : left + self.size]
            np.subtract(
                image[part],
                mean if mean.ndim == 1 else mean[part],
                out=target[:, ::step],
                casting="same_kind",
            )
        return prepared

    def _places(self, images: np.ndarray, mode: str, number: int) -> np.ndarray:
        """Top, left, and the step of columns (-1 mirrors) of each image, `[n, 3]`."""
        count, *sizes = images.shape[:3]
        spare = np.array(sizes) - self.size
        if mode != "train":
            return np.tile([*spare // 2, 1], (count, 1))
        draw = np.random.default_rng([self.seed, number])
        return np.column_stack(
            [draw.integers(0, spare + 1, (count, 2)), 1 - 2 * draw.integers(0, 2, count)]
        )

    def _check(self, images: np.ndarray, mean: np.ndarray) -> None:
        if images.ndim != 4 or min(images.shape[1:3]) < self.size:
            raise ValueError(
                "Images must be of shape [n, h, w, c], with h and w at least `size`. Received: images of shape "
                f"{list(images.shape)}, size={self.size}. Give a smaller `size`, or larger images."
            )
        if mean.shape not in (images.shape[1:], images.shape[3:]):
            raise ValueError(
                f"`mean` must be of the images' shape, [h, w, c] or [c]. Received: mean of shape {list(mean.shape)}, "
                f"images of shape {list(images.shape)}. Take the mean of images of this size, or of their channels."
            )


def _check_not_negative(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"`{name}` must not be negative. Received: {name}={value}. Count from 0.")
