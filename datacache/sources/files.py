"""Files of a source, which must not change after they were listed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from datacache.native import FileStatus, read_file
from datacache.sources.source import SourceError

SAMPLED_BLOCKS = 64
"""Blocks of the contents that distinguish sources whose files have equal names, sizes and times, as
is common in container images and archives."""
LEAST_BLOCKS = 3
"""Blocks of each sampled file: its start, its middle and its end."""
BLOCK_BYTES = 2**16
READERS = 32
"""Files that are read concurrently: on a network file system each read waits."""


def read_listed(path: str, offset: int, length: int, listed: FileStatus) -> bytes:
    """Reads a part of a file that has not changed since it was listed."""
    content, now = read_file(path, offset, length)
    refuse_changed(path, now, listed)
    return content


def refuse_changed(path: str, now: FileStatus, listed: FileStatus) -> None:
    """Raises `SourceError` for a file that has changed since it was listed."""
    if not now.is_of(listed):
        raise SourceError(
            "Files must not change while a cache reads them. Received: "
            f"{path}, changed or replaced since it was listed ({listed.size} bytes then, "
            f"{now.size} bytes now). Open the cache again: samples of changed files are stored "
            "separately."
        )


def contents_digest(count: int, file: Callable[[int], tuple[str, FileStatus]]) -> str:
    """Returns the SHA-256 of a sample of the contents of files, in hexadecimal.

    Cost: reads at most 64 files, three blocks of 64 KiB of each, or 64 blocks in total of few
    files.
    """
    chosen = np.linspace(0, count - 1, min(count, SAMPLED_BLOCKS)).astype(int)
    blocks = max(LEAST_BLOCKS, SAMPLED_BLOCKS // len(chosen))

    def sample(index: int) -> bytes:
        path, listed = file(index)
        size, last = listed.size, max(0, listed.size - BLOCK_BYTES)
        parts = [(int(begin), BLOCK_BYTES) for begin in np.linspace(0, last, blocks)]
        if size <= blocks * BLOCK_BYTES:
            parts = [(0, size)]
        content = b"".join(read_listed(path, *part, listed) for part in parts)
        return hashlib.sha256(content).digest()

    with ThreadPoolExecutor(READERS) as threads:
        try:
            return hashlib.sha256(b"".join(threads.map(sample, chosen.tolist()))).hexdigest()
        except OSError as error:
            raise SourceError(
                f"Files of a source must be readable. Received: {error}. Check the file and the "
                "mount."
            ) from error
