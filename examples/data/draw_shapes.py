"""Draws images of ten classes, five shapes with two textures each, into a folder.

python examples/data/draw_shapes.py /tmp/shapes

The images replace photographs in tests: colors, positions, sizes, rotations and backgrounds vary at
random, so that only shape and texture together determine the class. FOLDER/train and FOLDER/test
contain a folder for each class, as in ImageNet.
"""

import argparse
import itertools
import shutil
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

SHAPES = {
    # Each function returns whether a point is inside; x and y are 0 at the center, in radii.
    "circle": lambda x, y: np.hypot(x, y) < 0.9,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.8,
    "triangle": lambda x, y: (y > -0.6) & (y + 1.75 * abs(x) < 1.1),
    "star": lambda x, y: np.hypot(x, y) < 0.7 + 0.4 * np.cos(5 * np.arctan2(y, x)),
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 1),
}
TEXTURES = {
    # Each function returns whether a point has the second color; u and v are in periods.
    "stripes": lambda u, v: np.sin(2 * np.pi * u) > 0,
    "checks": lambda u, v: np.sin(2 * np.pi * u) * np.sin(2 * np.pi * v) > 0,
}
CLASSES = [f"{shape}-{texture}" for shape, texture in itertools.product(SHAPES, TEXTURES)]


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to create")
    parser.add_argument("--train", type=int, default=4000, help="training images (4000)")
    parser.add_argument("--test", type=int, default=1000, help="test images (1000)")
    parser.add_argument("--size", type=int, default=72, help="side of an image in pixels (72)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the images (0)")
    return parser.parse_args()


def rotated(x, y, angle):
    """Returns coordinates rotated by an angle."""
    return np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y


def image(label, size, rng):
    """Draws one image.

    Args:
      label: Index of the image's class in `CLASSES`.
      size: Side of the image in pixels.
      rng: NumPy random generator.

    Returns:
      `[size, size, 3]` uint8.
    """
    shape, texture = CLASSES[label].split("-")
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    radius = rng.uniform(0.5, 0.8)
    center = rng.uniform(-0.9 + radius, 0.9 - radius, 2)
    own_x, own_y = rotated(x - center[0], y - center[1], rng.uniform(-0.5, 0.5))
    inside = SHAPES[shape](own_x / radius, own_y / radius)
    # The texture has its own rotation, and the same number of periods in images of any size.
    u, v = rotated(own_x, own_y, rng.uniform(0, np.pi))
    period, phase = rng.uniform(0.35, 0.5), rng.uniform(0, 1, 2)
    is_second = TEXTURES[texture](u / period + phase[0], v / period + phase[1])
    first, second, behind = colors(rng)
    # The background has a gradient of lightness, and the whole image has noise.
    light = 1 + rng.uniform(-0.3, 0.3) * x + rng.uniform(-0.3, 0.3) * y
    painted = np.where(is_second[..., None], second, first)
    drawn = np.where(inside[..., None], painted, behind * light[..., None])
    drawn = drawn + rng.normal(0, 0.06, drawn.shape)
    return (255 * np.clip(drawn, 0, 1)).astype("uint8")


def colors(rng):
    """Returns three random colors of different lightness, in random order."""
    lightness = rng.permutation([0.15, 0.5, 0.85])
    return [np.clip(light + rng.uniform(-0.12, 0.12, 3), 0, 1) for light in lightness]


def draw(folder, train=4000, test=1000, size=72, seed=0):
    """Draws training and test images, with the same number in each class.

    Args:
      folder: Folder to create; an existing one is unchanged.
      train: Number of training images.
      test: Number of test images.
      size: Side of an image in pixels.
      seed: Seed of the images.
    """
    if folder.exists():
        return
    # Rename the folder at the end, so that a folder with the final name is always complete.
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    for number, (name, count) in enumerate({"train": train, "test": test}.items()):
        rng = np.random.default_rng([seed, number])
        for index in range(count):
            label = index % len(CLASSES)
            file = part / name / CLASSES[label] / f"{index:06}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = image(label, size, rng)
            file.write_bytes(tf.io.encode_jpeg(pixels, quality=92).numpy())
    part.rename(folder)


def main():
    options = parse_arguments()
    if options.folder.exists():
        sys.exit(
            f"FOLDER must not exist. Received: {options.folder}. Pass another folder, or remove it"
        )
    draw(options.folder, options.train, options.test, options.size, options.seed)
    print(f"{options.train} and {options.test} images of {len(CLASSES)} classes: {options.folder}")


if __name__ == "__main__":
    main()
