"""Samples as bytes, to send them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datacache.pool.layout import Arrays, Component, Layout, as_array


def packed(samples: Sequence[Arrays], layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """All samples one after the other, `[bytes]` uint8, and the bytes of each, `[n]` int64."""
    texts = [
        b"".join(_pack(*pair) for pair in zip(layout.components, sample, strict=True))
        for sample in samples
    ]
    return np.frombuffer(b"".join(texts), np.uint8), np.array(
        [len(text) for text in texts], np.int64
    )


def _pack(component: Component, array: np.ndarray) -> bytes:
    array = as_array(array)
    if not component.varies:
        return array.tobytes()
    content = component.encoded(array)
    return np.array([len(content), *array.shape], np.int64).tobytes() + content


def unpacked(content: np.ndarray, layout: Layout) -> Arrays:
    """One sample, from its bytes."""
    arrays = []
    for component in layout.components:
        if component.varies:
            head = 8 * (1 + len(component.shape))
            length, *shape = np.frombuffer(content[:head].tobytes(), np.int64).tolist()
            arrays.append(component.decoded(content[head : head + length].tobytes(), shape))
            content = content[head + length :]
        else:
            dtype, shape = component.column
            arrays.append(
                np.frombuffer(content[: component.column_bytes].tobytes(), dtype).reshape(shape)
            )
            content = content[component.column_bytes :]
    return arrays
