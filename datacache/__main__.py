"""Implements `python -m datacache`, which lists, verifies, fills and removes stores of caches."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from datacache.errors import CacheError
from datacache.from_tfposeidon import ProgressBar, import_tensorflow, readable_size, table
from datacache.pool.folder import default_memory, remove
from datacache.pool.inspection import PoolReport, find_pools, inspect_pool
from datacache.pool.pool import Pool
from datacache.sources.source import SourceError
from datacache.statistics import Counts
from datacache.system.access import Directory, Others
from datacache.system.background import done_in_windows

DONE, CORRUPT, NO_ROOM, FAILED, INTERRUPTED = 0, 1, 1, 2, 130
HEADINGS = ("FOLDER", "SOURCE", "READY", "CAPACITY", "SAMPLES", "SIZE", "LAST OPENED", "STATE")
SAMPLES_PER_CHECK = 256
"""Number of samples that `verify` reads between two updates of the progress bar."""
DESCRIPTION = """Manages stores: folders of cached samples, in /dev/shm or on local disks.

  python -m datacache ls                                    list your stores in shared memory
  python -m datacache ls /local/cache                       list the stores on a disk
  python -m datacache warm /data/train --disk /local/cache  copy files to a local disk
  python -m datacache rm --all /local/cache                 remove all stores that are not in use

All commands are safe while jobs run. Only `warm` needs TensorFlow. The exit status is 2 if an
operation failed."""
LS = """Lists stores, their sizes and ready samples, and whether a process has them open.

The command only reads stores. Unusable stores are listed with the reason; `rm` removes them."""
VERIFY = """Compares all ready samples with their checksums.

Corrupted samples are marked, and jobs regenerate them. The exit status is 1 if a sample is
corrupted."""
WARM = """Copies the files of a folder to a local disk before jobs start.

Jobs read the copies with `datacache.Cache(datacache.from_folder(SOURCE), disk=FOLDER)`, if they
pass the same `extensions` and `labels` to `from_folder`. Files that are already on the disk are not
read again, so the command can be interrupted and repeated, also while jobs run. The exit status is
1 if the disk has too little free space for all files."""
RM = """Removes stores that no process has open, and the remains of incomplete stores.

A folder with any other content is not removed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 (corrupted samples, full disk), 2 (error) or 130 (Ctrl-C)."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except BrokenPipeError:
        # The reader has closed the output, as in `ls | head`. Without a new output, Python would
        # fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (CacheError, SourceError, OSError) as error:
        return _failed(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m datacache", description=DESCRIPTION)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    ls = _add_command(commands, "ls", _ls, LS)
    verify = _add_command(commands, "verify", _verify, VERIFY)
    warm = _add_command(commands, "warm", _warm, WARM)
    rm = _add_command(commands, "rm", _rm, RM)
    folders: dict[str, Any] = {"type": Path, "metavar": "FOLDER"}
    ls_help = f"a store, or a folder of stores (default: {default_memory()})"
    ls.add_argument("folders", nargs="*", help=ls_help, **folders)
    ls.add_argument("--json", action="store_true", help="print JSON")
    verify.add_argument("folders", nargs="+", help="a store, or a folder of stores", **folders)
    warm_help = "folder with one folder of files per class"
    warm.add_argument("source", type=Path, metavar="SOURCE", help=warm_help)
    warm.add_argument("--disk", required=True, help="folder on a local disk", **folders)
    extensions_help = "extensions of the files to copy; without values all files (default: images)"
    warm.add_argument("--extensions", nargs="*", metavar="EXTENSION", help=extensions_help)
    labels_help = "copy files for from_folder(..., labels=False)"
    warm.add_argument("--no-labels", action="store_true", help=labels_help)
    rm.add_argument("folders", nargs="*", help="a store; with --all a folder of stores", **folders)
    all_help = f"remove all stores in these folders (default: {default_memory()})"
    rm.add_argument("--all", action="store_true", help=all_help)
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], description: str
) -> argparse.ArgumentParser:
    first = description.partition("\n")[0].rstrip(".")
    help_text = first[0].lower() + first[1:]
    added: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=description
    )
    added.formatter_class = argparse.RawDescriptionHelpFormatter
    added.set_defaults(run=run)
    return added


def _ls(options: argparse.Namespace) -> int:
    roots = options.folders or _own_memory()
    found = [path for root in roots for path in find_pools(root)]
    reports = [report for path in found if (report := inspect_pool(path))]
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2, default=str))
    elif reports:
        reasons = [f"{one.folder} cannot be used. {one.trouble}" for one in reports if one.trouble]
        print("\n".join([*table([HEADINGS, *map(_row, reports)]), *reasons]))
    else:
        print(f"No stores in {', '.join(map(str, roots or [default_memory()]))}.")
    return DONE


def _own_memory(others: Others = "refused") -> list[Path]:
    """Returns this user's folder in shared memory, or an empty list if it does not exist."""
    root = Path(default_memory())
    try:
        # Opening the folder checks its owner: another user may have created it.
        Directory(root, others).close()
    except FileNotFoundError:
        return []
    return [root]


def _row(report: PoolReport) -> tuple[str, ...]:
    counts = (report.source, report.ready, report.slots, report.samples)
    return (
        str(report.folder),
        *("?" if report.trouble else str(value) for value in counts),
        readable_size(report.bytes),
        f"{report.opened:%Y-%m-%d %H:%M}",
        ("unusable, " if report.trouble else "") + ("in use" if report.in_use else "idle"),
    )


def _verify(options: argparse.Namespace) -> int:
    found = [
        path
        for folder in options.folders
        for path in (find_pools(folder) if folder.is_dir() else []) or [folder]
    ]
    return max(_each(found, _verify_one))


def _verify_one(folder: Path) -> int:
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


def _warm(options: argparse.Namespace) -> int:
    # Import these modules here, so that the other commands do not wait for TensorFlow.
    import_tensorflow()
    from datacache.sources.image_folder import from_folder
    from datacache.tiers.opening import open_stored_pool
    from datacache.tiers.tier import SourceTier, StoreTier

    chosen = {} if options.extensions is None else {"extensions": options.extensions or None}
    source = from_folder(options.source, labels=not options.no_labels, **chosen)
    samples, counter = np.arange(len(source)), Counts()
    pool = open_stored_pool(source, options.disk.expanduser())
    # Skip verification: jobs verify samples before use, and `verify` checks all of them.
    with StoreTier(pool, SourceTier(source, counter), counter, "never") as stored:
        lacking = stored.not_ready(samples[pool.has_room(samples)])
        bar = ProgressBar(len(lacking), "files")
        try:
            for count in done_in_windows(stored.samples, lacking):
                bar.add(count)
        finally:
            bar.close()
        counts, ready = counter.now(), pool.filled
    read = f"{counts.source_reads} files read ({readable_size(counts.source_bytes)})"
    print(f"{pool.folder}: {read}, {ready} ready")
    if ready == len(source):
        return DONE
    print(
        f"{len(source) - ready} files do not fit on the disk. Free space and remove the "
        "store, or pass another disk.",
        file=sys.stderr,
    )
    return NO_ROOM


def _rm(options: argparse.Namespace) -> int:
    if not options.folders and not options.all:
        raise CacheError(
            "`rm` requires the stores to remove. Received: folders=[]. Pass the folders of the "
            "stores, or --all."
        )
    roots = options.folders or _own_memory("ignored")
    found = [path for root in roots for path in find_pools(root)] if options.all else roots
    return max(_each(found, _rm_one), default=DONE)


def _rm_one(folder: Path) -> int:
    report = inspect_pool(folder)
    remove(folder)
    print(f"{folder}: freed {readable_size(report.bytes if report else 0)}")
    return DONE


def _each(folders: Sequence[Path], run: Callable[[Path], int]) -> list[int]:
    """Runs a command for each folder, even after failures; returns the exit statuses."""
    statuses = []
    for folder in folders:
        try:
            statuses.append(run(folder))
        except (CacheError, OSError) as error:
            statuses.append(_failed(error))
    return statuses


def _failed(error: Exception) -> int:
    print(f"datacache: {error}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
