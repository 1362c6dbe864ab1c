"""Serialization of samples, to send them to other nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from datacache.pool.layout import Arrays, Component, Layout, as_array


def pack_samples(samples: Sequence[Arrays], layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Returns all samples concatenated, `[bytes]` uint8, and the bytes of each, `[n]` int64.

    Example:
      >>> layout = Layout.of([np.zeros(2, "uint8"), np.array(b"", object)])
      >>> content, lengths = pack_samples([[np.array([1, 2], "uint8"), b"text"]], layout)
      >>> unpack_sample(content[: lengths[0]], layout)
      [array([1, 2], dtype=uint8), array(b'text', dtype=object)]
    """
    texts = [
        b"".join(_pack(*pair) for pair in zip(layout.components, sample, strict=True))
        for sample in samples
    ]
    lengths = np.array([len(text) for text in texts], np.int64)
    return np.frombuffer(b"".join(texts), np.uint8), lengths


def _pack(component: Component, array: np.ndarray) -> bytes:
    array = as_array(array)
    if not component.varies:
        return array.tobytes()
    content = component.encode(array)
    return np.array([len(content), *array.shape], np.int64).tobytes() + content


def unpack_sample(content: np.ndarray, layout: Layout) -> Arrays:
    """Returns the components of one sample from its bytes."""
    arrays = []
    for component in layout.components:
        if component.varies:
            head = 8 * (1 + len(component.shape))
            length, *shape = np.frombuffer(content[:head].tobytes(), np.int64).tolist()
            arrays.append(component.decode(content[head : head + length].tobytes(), shape))
            content = content[head + length :]
        else:
            dtype, shape = component.column
            size = component.column_bytes
            # Copied by `tobytes`, because components may be unaligned within the message.
            arrays.append(np.frombuffer(content[:size].tobytes(), dtype).reshape(shape))
            content = content[size:]
    return arrays
