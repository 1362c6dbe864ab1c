"""Metadata word of each sample: whether it is ready, its checksum, and the boot of verification."""

from __future__ import annotations

import functools
import hashlib
import mmap
from pathlib import Path

import numpy as np

from datacache.native import mark_words

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
READY = 1 << 32
"""Bit that is set once a sample is complete; the bits below contain the CRC-32 of its bytes."""
CHECKSUM = READY - 1
NOT_READY = np.uint64(0)
CONTENT = np.uint64(READY | CHECKSUM)
"""Bits that change only when the sample itself is written or cleared."""
BOOT_SHIFT = np.uint64(33)
"""First of the bits with the boot number in which a process verified the checksum."""
# np.uint64, because NumPy 1 cannot shift an unsigned integer by a Python int.


@functools.cache
def boot_number() -> np.uint64:
    """Returns a number from 1 to 2^31 - 1 that, with high probability, differs between boots."""
    # Equal in all processes and containers of the machine, which share the kernel. It is never 0,
    # which represents "in no boot", and fits into the upper bits of a word.
    digits = hashlib.sha256(BOOT_ID.read_bytes()).hexdigest()
    return np.uint64(int(digits, 16) % (2**31 - 1) + 1)


class SampleWords:
    """The `words` file of a store, one 64-bit word per slot, shared by all processes.

    A checksum is verified once per boot and not once per process: memory does not change while the
    machine runs, but data that a disk had not yet written at a power loss are corrupted. A word
    therefore also holds the number of the boot of its last verification.
    """

    def __init__(self, mapping: mmap.mmap, slots: int) -> None:
        # Other processes may write the words, `[slots]` uint64, at any time.
        self.array = np.ndarray((slots,), np.uint64, mapping)
        self._boot = boot_number()
        self._verified_mark = self._boot << BOOT_SHIFT
        # Slots that this process wrote, or verified where words cannot be marked.
        self._trusted = np.zeros(slots, bool)

    def withdraw(self, index: int) -> None:
        """Marks a slot as not ready; must precede any change of its bytes."""
        self.array[index] = 0

    def publish(self, index: int, checksum: int) -> None:
        """Marks a slot as ready; must follow all writes of its bytes."""
        # Not marked as verified: other processes must verify the data of this process. A process
        # that is killed before leaves a slot that is not ready, which needs no cleanup.
        self.array[index] = READY | checksum
        self._trusted[index] = True

    def clear(self) -> None:
        """Marks all slots as not ready."""
        self.array[:] = 0
        self._trusted[:] = False

    def unverified(self, indices: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns which of these slots have not been verified in this boot, `[n]` bool."""
        return ~self._trusted[indices] & (words >> BOOT_SHIFT != self._boot)

    def unchanged(self, indices: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Returns which slots were ready, and neither cleared nor rewritten since, `[n]` bool."""
        return (words >= READY) & ((self.array[indices] ^ words) & CONTENT == 0)

    def mark_verified(self, indices: np.ndarray, words: np.ndarray) -> None:
        """Marks unchanged slots as verified in this boot; needs the native library."""
        intact = np.ones(len(indices), bool)
        mark_words(self.array, indices, words, intact, CONTENT, self._verified_mark)

    def settle(self, indices: np.ndarray, words: np.ndarray, intact: np.ndarray) -> np.ndarray:
        """Marks intact slots as verified, and corrupted ones as not ready; returns the corrupted.

        A slot that another process has cleared or rewritten since is skipped: the read bytes were a
        mixture of both versions, and do not show whether either is intact.
        """
        unchanged = mark_words(self.array, indices, words, intact, CONTENT, self._verified_mark)
        if unchanged is None:
            # NumPy has no compare-and-swap, so a concurrent write of a word could be lost. Only 0
            # is safe to write: at worst, a sample is produced again.
            unchanged = self.unchanged(indices, words)
            self.array[indices[unchanged & ~intact]] = NOT_READY
            self._trusted[indices[unchanged & intact]] = True
        corrupt = unchanged & ~intact & (words >= READY)
        # Another process may rewrite them, and this process has not verified the new bytes.
        self._trusted[indices[corrupt]] = False
        return corrupt


def match_checksums(words: np.ndarray, checksums: np.ndarray) -> np.ndarray:
    """Returns which samples are ready and match the checksum of their write, `[n]` bool."""
    return (words & CHECKSUM == checksums) & (words >= READY)
