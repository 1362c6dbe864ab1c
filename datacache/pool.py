"""A pool of samples in memory that all processes of a node map: written once, read by everybody."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from datacache.layout import Layout
from datacache.order import permutation

FORMAT = 1
READY = 1 << 32
"""Set in a sample's word beside the checksum in the lower half: what is 0 was never finished."""


class CacheError(RuntimeError):
    """A folder that is no cache, or that cannot hold one."""


class Pool:
    """Samples in a folder, usually of `/dev/shm`.

    A sample is written, then its word: a checksum and a mark that it is ready. A process that is killed in between
    leaves a sample that is not ready, and locks that the kernel has released. There is room for `slots` samples; with
    fewer than there are, a choice that depends on the seed is kept and the others have none.

    Args:
      folder: Made if it does not exist.
      layout: Of the samples.
      samples: How many there are.
      slots: How many there is room for.
      seed: Of the choice.

    Raises:
      CacheError: If the folder holds something else, or another pool, or there is no room for this one.
    """

    def __init__(self, folder: Path, layout: Layout, samples: int, slots: int, seed: int = 0) -> None:
        self.folder, self.layout, self.samples = Path(folder), layout, samples
        self.slots = min(slots, samples)
        self._about = {
            "format": FORMAT,
            "layout": layout.to_dict(),
            "samples": samples,
            "slots": self.slots,
            "seed": seed,
        }
        self._places = _chosen(samples, self.slots, seed)
        self._make_once()
        self._map()
        self._verified = np.zeros(self.slots, bool)

    def has_room(self, samples: np.ndarray) -> np.ndarray:
        """Which of these samples the pool can hold, `[n]` bool."""
        return self._places[samples] >= 0

    def ready(self, samples: np.ndarray) -> np.ndarray:
        """Which of these samples can be read, `[n]` bool."""
        places = self._places[samples]
        return (places >= 0) & (self._words[np.maximum(places, 0)] >= READY)

    def put(self, sample: int, arrays: Sequence[Any]) -> None:
        """Writes a sample that has room, and then that it is ready.

        Raises:
          ValueError: If it has other shapes or types than the layout.
        """
        place = self._places[sample]
        self._words[place] = 0
        for column, array in zip(self._columns, self.layout.check(arrays, f"sample {sample}"), strict=True):
            column[place] = array
        self._words[place] = READY | self._checksum(place)

    def gather(self, samples: np.ndarray, into: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        """Copies samples that are ready: one array `[n, *shape]` for each component.

        Args:
          samples: Their numbers, `[n]`.
          into: Arrays to copy to, in place of new ones.
        """
        places = self._places[samples]
        targets = [None] * len(self._columns) if into is None else into
        # They are in range, as the table of places has them, and "clip" spares a copy of the result.
        pairs = zip(self._columns, targets, strict=True)
        return [np.take(column, places, axis=0, out=target, mode="clip") for column, target in pairs]

    def torn(self, samples: np.ndarray) -> np.ndarray:
        """Those of these ready samples whose bytes are not those that were written; each is looked at once.

        They are not ready any more.
        """
        places = self._places[samples]
        unseen = np.flatnonzero(~self._verified[places])
        torn = [i for i in unseen if int(self._words[places[i]]) != READY | self._checksum(places[i])]
        self._verified[places[unseen]] = True
        for i in torn:
            self._words[places[i]] = 0
            self._verified[places[i]] = False
        return samples[torn]

    @contextlib.contextmanager
    def claim(self, sample: int) -> Iterator[bool]:
        """Within it nobody else fills this sample; `False` if somebody does already. The kernel ends all claims."""
        # A description of its own: locks are per description, and so between threads, too.
        handle = os.open(self.folder / "claims", os.O_RDWR)
        try:
            yield _lock(handle, int(self._places[sample]))
        finally:
            os.close(handle)

    @property
    def filled(self) -> int:
        """How many samples are ready."""
        return int((self._words >= READY).sum())

    def close(self) -> None:
        """Ends the mappings; arrays of `gather` remain."""
        self._columns.clear()
        self._words = np.zeros(0, np.uint64)

    def _checksum(self, place: int) -> int:
        checksum = 0
        for column in self._columns:
            checksum = zlib.crc32(column[place : place + 1].view(np.uint8).data, checksum)
        return checksum

    def _make_once(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            header = self.folder / "header.json"
            if not header.exists():
                self._make()
                beside = header.with_suffix(".part")
                beside.write_text(json.dumps(self._about))
                beside.replace(header)
            _check_header(header, self._about)

    def _make(self) -> None:
        ours = {"lock", "samples", "words", "claims", "header.part"}
        strangers = {path.name for path in self.folder.iterdir()} - ours
        if strangers:
            raise CacheError(
                f"A cache must have a folder of its own. Received: {self.folder}, which holds {min(strangers)!r}. Name "
                "another, or empty it."
            )
        for name, size in (("samples", self.layout.offsets(self.slots)[-1]), ("words", 8 * self.slots), ("claims", 0)):
            with (self.folder / name).open("wb") as stream:
                _allocate(stream.fileno(), size, self.folder)

    def _map(self) -> None:
        self._columns = self.layout.columns(self._mapping("samples"), self.slots)
        self._words = np.ndarray((self.slots,), np.uint64, self._mapping("words"))

    def _mapping(self, name: str) -> mmap.mmap:
        with (self.folder / name).open("r+b") as stream:
            return mmap.mmap(stream.fileno(), 0)


def _chosen(samples: int, slots: int, seed: int) -> np.ndarray:
    """The place of each sample, `[samples]` int64, or -1."""
    if slots == samples:
        return np.arange(samples)
    places = np.full(samples, -1)
    places[np.sort(permutation(samples, seed, samples)[:slots])] = np.arange(slots)
    return places


def _allocate(handle: int, size: int, folder: Path) -> None:
    if not size:
        return
    try:
        # Where a file system cannot allocate, the C library would write until it is full.
        if size > shutil.disk_usage(folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        # A file with holes would end the process that writes into one when memory is full.
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        os.ftruncate(handle, 0)
        raise CacheError(
            f"A pool needs room before it begins. Received: {folder}, without {size} bytes. Give it a smaller budget."
        ) from error


def _check_header(path: Path, about: dict[str, Any]) -> None:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise CacheError(f"A cache must be whole. Received: {path}, which is no JSON. Remove the folder.") from error
    if found.get("format", 0) > FORMAT:
        raise CacheError(
            f"A cache must be of a format up to {FORMAT}. Received: format {found['format']} in {path.parent}. Use a "
            "newer tfposeidon, or another folder."
        )
    wanted = json.loads(json.dumps(about))
    if found != wanted:
        name = next(name for name in wanted if found.get(name) != wanted[name])
        raise CacheError(
            f"A pool is opened as it was made. Received: {name}={wanted[name]}, and {found.get(name)} in "
            f"{path.parent}. Use another folder."
        )


def _lock(handle: int, place: int) -> bool:
    """Locks one byte of an open file description."""
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
