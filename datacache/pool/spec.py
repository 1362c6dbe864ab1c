"""Description of a store: the content of its header, and the files that it implies."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from datacache.pool.folder import Blueprint
from datacache.pool.heap import STATE_BYTES
from datacache.pool.layout import Layout
from datacache.pool.shard import SampleShard

WORD = np.dtype(np.uint64)
"""Dtype of the metadata word of each sample, which is stored next to the columns."""


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Immutable description of a store, saved in its header.

    `heap_bytes` limits the heap, which holds components that differ in size. It is not saved in the
    header, because the size of the file implies it. `source` is the user's name of the source.

    Example:
      >>> layout = Layout.of([np.zeros((2, 2), "uint8"), np.int64(0)])
      >>> spec = PoolSpec(layout=layout, shard=SampleShard(samples=10, slots=4))
      >>> spec.blueprint().files
      {'samples': 128, 'words': 32}
      >>> PoolSpec.from_dict(spec.to_dict()) == spec
      True
    """

    layout: Layout
    shard: SampleShard
    heap_bytes: int = 0
    source: str = ""

    def blueprint(self) -> Blueprint:
        """Returns the header and the files of a new store with this description."""
        files = {
            "samples": self.layout.offsets(self.shard.kept_samples)[-1],
            "words": WORD.itemsize * self.shard.kept_samples,
        }
        growing = {}
        if self.layout.varies:
            files["end"], growing["heap"] = STATE_BYTES, self.heap_bytes
        return Blueprint(header=self.to_dict(), files=files, growing=growing)

    def to_dict(self) -> dict[str, Any]:
        """Returns the description as values for JSON."""
        # The keys are the format on disk, independent of the names of the attributes.
        return {"layout": self.layout.to_dict(), "part": asdict(self.shard), "source": self.source}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> PoolSpec:
        """Returns the description that `to_dict` wrote."""
        return cls(
            layout=Layout.from_dict(content["layout"]),
            shard=SampleShard(**content["part"]),
            source=content.get("source", ""),
        )
