"""The word of each sample: whether it is ready, its checksum, and when that was verified."""

from __future__ import annotations

import mmap

import numpy as np

from datacache.native import mark_words
from datacache.system.boot import boot_number

READY = 1 << 32
"""Bit that is set once a sample is complete; the CRC-32 of its bytes stands in the bits below."""
CHECKSUM = READY - 1
NOT_READY = np.uint64(0)
CONTENT = np.uint64(READY | CHECKSUM)
"""Bits that change only when the sample itself is written or cleared."""
BOOT_SHIFT = np.uint64(33)
"""First of the bits that hold the boot number in which a process verified the checksum."""
# NumPy 1 refuses to shift an unsigned integer by a Python int, hence the np.uint64 above.


class SampleWords:
    """The `words` file of a pool, one 64-bit word per slot, shared by all processes.

    A checksum is verified once per boot and not once per process: memory stays as it was written
    while the machine runs, but what a disk had not yet written when the machine lost its power is
    corrupt. So a word also holds the number of the boot in which somebody verified it.

    Attributes:
      array: The words, `[slots]` uint64; other processes may write them at any time.
    """

    def __init__(self, mapping: mmap.mmap, slots: int) -> None:
        self.array = np.ndarray((slots,), np.uint64, mapping)
        self._boot = boot_number()
        self._verified_mark = self._boot << BOOT_SHIFT
        # What this process wrote itself, or verified where words cannot be marked.
        self._trusted = np.zeros(slots, bool)

    def ready(self, indices: np.ndarray) -> np.ndarray:
        """Returns which of these slots hold a sample that can be read, `[n]` bool."""
        return self.array[indices] >= READY

    def count_ready(self) -> int:
        """Returns the number of samples that can be read."""
        return int((self.array >= READY).sum())

    def withdraw(self, index: int) -> None:
        """Says that a slot is not ready; called before its bytes change."""
        self.array[index] = 0

    def publish(self, index: int, checksum: int) -> None:
        """Says that a slot is ready; called after all its bytes are written.

        A process that is killed before leaves a slot that is not ready, and nothing to clean up.
        """
        # Not marked as verified: others are to verify what this process wrote.
        self.array[index] = READY | checksum
        self._trusted[index] = True

    def clear(self) -> None:
        """Says that no slot is ready."""
        self.array[:] = 0
        self._trusted[:] = False

    def unverified(self, indices: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns which of these slots nobody has verified in this boot, `[n]` bool."""
        return ~self._trusted[indices] & (words >> BOOT_SHIFT != self._boot)

    def unchanged(self, indices: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns which slots were ready, and neither cleared nor rewritten since, `[n]` bool."""
        return (words >= READY) & ((self.array[indices] ^ words) & CONTENT == 0)

    def mark_verified(self, indices: np.ndarray, words: np.ndarray) -> None:
        """Marks slots that have not changed as verified in this boot; needs the native library."""
        intact = np.ones(len(indices), bool)
        mark_words(self.array, indices, words, intact, CONTENT, self._verified_mark)

    def settle(self, indices: np.ndarray, words: np.ndarray, intact: np.ndarray) -> np.ndarray:
        """Marks slots as verified if they are intact, and as not ready if they are corrupt.

        A slot that another process has cleared or rewritten since is left alone: the bytes that
        were read were then a mixture, and say nothing about either version.

        Returns:
          True for samples that are corrupt, and not ready any more, `[n]` bool.
        """
        unchanged = mark_words(self.array, indices, words, intact, CONTENT, self._verified_mark)
        if unchanged is None:
            # NumPy has no compare-and-swap, so a word that another process writes at the same time
            # could be lost. Only 0 can be written safely: at worst a sample is made again.
            unchanged = self.unchanged(indices, words)
            self.array[indices[unchanged & ~intact]] = NOT_READY
            self._trusted[indices[unchanged & intact]] = True
        corrupt = unchanged & ~intact & (words >= READY)
        # Another process may write them anew, and this one has not verified those bytes.
        if corrupt.any():
            self._trusted[indices[corrupt]] = False
        return corrupt

    def close(self) -> None:
        """Drops the mapping."""
        self.array = np.zeros(0, np.uint64)


def match_checksums(words: np.ndarray, checksums: np.ndarray) -> np.ndarray:
    """Returns which samples are ready and have the checksum of what was written, `[n]` bool."""
    return (words & CHECKSUM == checksums) & (words >= READY)
