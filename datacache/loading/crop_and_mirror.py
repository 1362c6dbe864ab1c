"""Image preparation of Theano-MPI's loader: subtract the mean, crop, mirror."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from datacache.from_tfposeidon import check_integer


@dataclass(frozen=True, eq=False)
class CropAndMirror:
    """Image preparation that subtracts the mean, crops, and mirrors.

    Crops and mirroring are random in training; otherwise the crop is centered.

    Args:
      mean: Mean of the images, `[h, w, c]`, or of their channels, `[c]`.
      size: Height and width of the result in pixels.
      seed: Seed of the random crops, not negative.

    Raises:
      ValueError: If the rank of `mean` is neither 3 nor 1, or `size` or `seed` is out of range.

    Cost: one pass over the cropped part of the images, and no memory besides the result.

    Source: Ma, Mao and Taylor 2016, section 3.3, Algorithm 1, steps 17 and 18. Differs: each image
    has its own crop and mirroring, drawn from (seed, number); the paper does not specify the draw.

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
          number: Index of the batch, not negative, which seeds its draw. Use a different index for
            each batch and epoch.

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
            # Combines steps 17 and 18: the mean is cropped like the image, so that only the crop is
            # subtracted, and it is written backwards to mirror.
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
        if images.ndim != 4 or min(images.shape[1:3]) < self.size:
            raise ValueError(
                "Images must be of shape [n, h, w, c], with h and w at least `size`. Received: "
                f"images of shape {list(images.shape)}, size={self.size}. Pass a smaller `size`, "
                "or larger images."
            )
        if mean.shape not in (images.shape[1:], images.shape[3:]):
            raise ValueError(
                "`mean` must have the shape of an image, [h, w, c], or of its channels, [c]. "
                f"Received: mean of shape {list(mean.shape)}, images of shape "
                f"{list(images.shape)}. Pass the mean of images of this size, or of their channels."
            )
