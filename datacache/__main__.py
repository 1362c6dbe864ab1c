"""Implements `python -m datacache`, which lists, verifies and removes stores of caches."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from datacache.errors import CacheError
from datacache.from_tfposeidon import ProgressBar, readable_size, table
from datacache.pool.folder import (
    FILES,
    IN_USE,
    STORE,
    default_memory,
    open_store,
    read_header,
    remove,
)
from datacache.pool.pool import READY, Pool
from datacache.system.access import Directory
from datacache.system.descriptors import is_byte_locked

DONE, CORRUPT, FAILED, INTERRUPTED = 0, 1, 2, 130
HEADINGS = ("FOLDER", "SOURCE", "READY", "CAPACITY", "SAMPLES", "SIZE", "LAST OPENED", "STATE")
SAMPLES_PER_CHECK = 256
"""Number of samples that `verify` reads between two updates of the progress bar."""
BLOCK_BYTES = 512
"""Unit of `st_blocks` in bytes, independent of the block size of the file system."""
DESCRIPTION = """Manages stores: folders of cached samples, in /dev/shm or on local disks.

  python -m datacache ls                     list your stores in shared memory
  python -m datacache ls /local/cache        list the stores on a disk
  python -m datacache verify /local/cache    compare all ready samples with their checksums
  python -m datacache rm /local/cache        remove all stores that no process has open

All commands are safe while jobs run. Corrupted samples are marked, and jobs regenerate them. The
exit status is 1 if a sample is corrupted, and 2 if an operation failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 (corrupted samples), 2 (error) or 130 (Ctrl-C)."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options.folders)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CacheError, OSError) as error:
        return _failed(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m datacache", description=DESCRIPTION)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify, rm = functools.partial(_each, _verify), functools.partial(_each, _rm)
    for name, run, nargs, text in (
        ("ls", _ls, "*", "list stores, their sizes and ready samples, and whether they are in use"),
        ("verify", verify, "+", "compare all ready samples with their checksums"),
        ("rm", rm, "+", "remove stores that no process has open, and remains of stores"),
    ):
        command = commands.add_parser(name, help=text)
        help_text = "a store, or a folder of stores"
        command.add_argument("folders", nargs=nargs, type=Path, metavar="FOLDER", help=help_text)
        command.set_defaults(run=run)
    return parser


def _ls(folders: list[Path]) -> int:
    rows: list[tuple[str, ...]] = []
    reasons = [f"{root} does not exist." for root in folders if not root.exists()]
    status, roots = FAILED if reasons else DONE, folders or [Path(default_memory())]
    for folder in itertools.chain.from_iterable(map(_stores, roots)):
        try:
            rows.append(_row(folder))
        except (CacheError, OSError) as error:
            reasons.append(f"{folder} cannot be used. {error}")
    if not rows and not reasons:
        reasons = [f"No stores in {', '.join(map(str, roots))}."]
    print("\n".join([*(table([HEADINGS, *rows]) if rows else []), *reasons]))
    return status


def _row(folder: Path) -> tuple[str, ...]:
    with Directory(folder) as directory, open_store(directory, os.O_RDONLY) as file:
        spec, header_bytes = read_header(file, folder)
        slots = spec.shard.kept_samples
        # Read metadata without a mapping, because truncation would kill a process that maps a file.
        words = np.frombuffer(os.pread(file.fileno(), 8 * slots, header_bytes), np.uint64)
        counts = int((words >= READY).sum()), slots, spec.shard.samples
        opened = time.localtime(os.fstat(directory.fileno()).st_mtime)
        # Count blocks, because the size of a file with a sparse heap includes its holes.
        size = readable_size(BLOCK_BYTES * os.fstat(file.fileno()).st_blocks)
        state = "in use" if is_byte_locked(file, IN_USE) else "idle"
    time_text = time.strftime("%Y-%m-%d %H:%M", opened)
    return str(folder), spec.source, *map(str, counts), size, time_text, state


def _verify(folder: Path) -> int:
    with Pool(folder) as pool:
        samples = np.arange(pool.spec.shard.samples)
        samples = samples[pool.ready(samples)]
        progress, corrupt = ProgressBar(len(samples), "samples"), 0
        for begin in range(0, len(samples), SAMPLES_PER_CHECK):
            window = samples[begin : begin + SAMPLES_PER_CHECK]
            corrupt += len(pool.find_corrupt(window, recheck=True))
            progress.add(len(window))
        progress.close()
    again = ", which jobs regenerate" if corrupt else ""
    print(f"{folder}: {len(samples) - corrupt} samples intact, {corrupt} corrupted{again}")
    return CORRUPT if corrupt else DONE


def _rm(folder: Path) -> int:
    remove(folder)
    print(f"{folder}: removed")
    return DONE


def _stores(root: Path) -> list[Path]:
    """Returns `root` if it is a store or the remains of a store, else the stores in it."""
    if _looks_like_a_store(root) or not root.is_dir():
        return list(filter(_looks_like_a_store, [root]))
    try:
        return list(filter(_looks_like_a_store, sorted(root.iterdir())))
    except OSError:
        return [root]  # The command reports why the folder cannot be read.


def _looks_like_a_store(path: Path) -> bool:
    try:
        names = set(os.listdir(path))
    except OSError:
        return False
    return STORE in names or (bool(names) and names <= FILES)


def _each(run: Callable[[Path], int], folders: list[Path]) -> int:
    """Runs a command for each store, even after failures; returns the largest exit status."""
    statuses = []
    for folder in [store for root in folders for store in _stores(root) or [root]]:
        try:
            statuses.append(run(folder))
        except (CacheError, OSError) as error:
            statuses.append(_failed(error))
    return max(statuses)


def _failed(error: Exception) -> int:
    print(f"datacache: {error}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `ls | head` closes the pipe early.
    sys.exit(main())
