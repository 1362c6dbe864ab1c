"""Command `python -m datacache`, which lists, verifies, fills and removes the stores of caches."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from datacache.errors import CacheError
from datacache.from_tfposeidon import ProgressBar, import_tensorflow, readable_size, table
from datacache.pool.folder import default_memory, remove
from datacache.pool.inspection import Contents, PoolReport, find_pools, inspect_pool, read_contents
from datacache.pool.pool import open_existing
from datacache.sources.source import SourceError
from datacache.system.access import Access, Directory

DONE, CORRUPT, NO_ROOM, FAILED, INTERRUPTED = 0, 1, 1, 2, 130
HEADINGS = ("FOLDER", "SOURCE", "READY", "KEPT", "OF", "TAKES", "OPENED", "STATE")
MINUTE = "%Y-%m-%d %H:%M"
SAMPLES_PER_CHECK = 256
"""Samples that `verify` reads between two updates of the progress bar."""
DESCRIPTION = """Pools keep the samples of caches: in /dev/shm and on local disks, one folder each.

  python -m datacache ls                               what this user has in shared memory
  python -m datacache ls /local/cache                  what is on a disk
  python -m datacache warm /data/train --disk /local/cache
  python -m datacache rm --all /local/cache            what no job has open

All are safe while jobs run, and all but `warm` do without TensorFlow. The exit status is 2 if
something could not be done."""
LS = """Lists pools: what they keep, which of it is ready, and whether a process has them open.

Pools are only read. Those that cannot be used are listed with the reason, and `rm` removes them."""
VERIFY = """Compares all samples that are ready with their checksums.

Corrupt samples are marked, and jobs make them again. The exit status is 1 if there were any."""
WARM = """Copies the files of a folder to a local disk, so that jobs begin with a warm one.

Jobs find them with `datacache.Cache(datacache.from_folder(SOURCE), disk=DISK)`, if they name the
same endings and group, and both have labels or both have none. Files that are there already are not
read again, so the command can be interrupted and repeated, also while jobs run. The exit status is
1 if the disk has no room for all files."""
RM = """Removes pools that no process has open, and what is left of pools that were never finished.

A folder that holds anything else is left alone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 (corrupted, or disk full), 2 (error) or 130 (Ctrl-C)."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except BrokenPipeError:
        # The output is closed, as in `ls | head`. Python would fail again when it flushes at exit.
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

    def command(
        name: str, run: Callable[[argparse.Namespace], int], description: str
    ) -> argparse.ArgumentParser:
        help_text = description.partition("\n")[0].rstrip(".")
        added = commands.add_parser(
            name, help=help_text[0].lower() + help_text[1:], description=description
        )
        added.formatter_class = argparse.RawDescriptionHelpFormatter
        added.set_defaults(run=run)
        return added

    def folders(parser: argparse.ArgumentParser, count: str, help_text: str) -> None:
        parser.add_argument("folders", nargs=count, type=Path, metavar="FOLDER", help=help_text)

    ls = command("ls", _ls, LS)
    folders(ls, "*", f"a pool, or a folder of pools ({default_memory()})")
    ls.add_argument("--json", action="store_true", help="print JSON")
    stats = command("stats", _stats, "Shows everything that is known about a pool.")
    stats.add_argument("folder", type=Path, metavar="FOLDER", help="a pool")
    folders(command("verify", _verify, VERIFY), "+", "a pool, or a folder of pools")
    _add_warm(command("warm", _warm, WARM))
    rm = command("rm", _rm, RM)
    folders(rm, "*", "a pool; with --all a folder of pools")
    rm.add_argument(
        "--all", action="store_true", help=f"all pools in these folders ({default_memory()})"
    )
    return parser


def _add_warm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="folder with a folder of files for each class"
    )
    parser.add_argument(
        "--disk", type=Path, required=True, metavar="FOLDER", help="on a local disk"
    )
    parser.add_argument(
        "--extensions",
        nargs="*",
        metavar="END",
        help="endings of the files to take, all if none is named (of images)",
    )
    parser.add_argument(
        "--no-labels", action="store_true", help="for from_folder(..., labels=False)"
    )
    parser.add_argument(
        "--group", metavar="NAME", help="for Cache(..., group=NAME), whose members share the files"
    )


def _ls(options: argparse.Namespace) -> int:
    roots = options.folders or _own_memory()
    found = [path for root in roots for path in find_pools(root)]
    reports = [report for path in found if (report := inspect_pool(path))]
    if options.json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    elif reports:
        reasons = [f"{one.folder} cannot be used. {one.trouble}" for one in reports if one.trouble]
        print("\n".join([*table([HEADINGS, *map(_row, reports)]), *reasons]))
    else:
        print(f"No pools in {', '.join(map(str, roots or [default_memory()]))}.")
    return DONE


def _own_memory(closed: bool = True) -> list[Path]:
    """Returns this user's folder in shared memory, if it exists.

    Other users could have created a folder of that name, which is refused unless `closed` is false.
    """
    root = Path(default_memory())
    try:
        Directory(root, closed=closed).close()
    except FileNotFoundError:
        return []
    return [root]


def _row(report: PoolReport) -> tuple[str, ...]:
    of = report.contents
    samples = (
        (of.spec.source, str(of.ready), str(of.slots), str(of.spec.shard.samples))
        if of
        else ("?",) * 4
    )
    state = "in use" if report.in_use else "idle"
    return (
        str(report.folder),
        *samples,
        readable_size(report.bytes),
        f"{report.opened:{MINUTE}}",
        state if of else f"broken, {state}",
    )


def _stats(options: argparse.Namespace) -> int:
    of, report = read_contents(options.folder), inspect_pool(options.folder)
    if report is None:
        raise CacheError(
            f"A pool must stay to be looked at. Received: {options.folder}, which has gone."
        )
    facts = {
        "folder": str(report.folder),
        **_facts(of),
        "takes": readable_size(report.bytes),
        "made": f"{report.made:{MINUTE}}",
        "opened": f"{report.opened:{MINUTE}}, {'in use' if report.in_use else 'idle'}",
    }
    print("\n".join(table(list(facts.items()))))
    return DONE


def _facts(of: Contents) -> dict[str, str]:
    part, layout = of.spec.shard, of.spec.layout
    whose = f"of node {part.node}, which is one of {part.nodes}" if part.nodes > 1 else "of all"
    room = (
        "all"
        if of.slots == part.assigned_samples
        else f"{of.slots} that have room, chosen by seed {part.seed},"
    )
    heap = "none, as all samples are of one size"
    if of.heap_used is not None and of.heap_capacity is not None:
        heap = f"{readable_size(of.heap_used)} used of at most {readable_size(of.heap_capacity)}"
    return {
        "source": of.spec.source,
        "samples": f"{of.ready} ready of {of.slots} kept of {part.samples}",
        "part": f"{room} {whose}",
        "sample": ", ".join(map(str, layout.components)),
        "columns": (
            f"{layout.bytes} B for each sample, {readable_size(layout.offsets(of.slots)[-1])}"
        ),
        "heap": heap,
    }


def _verify(options: argparse.Namespace) -> int:
    found = [
        path
        for folder in options.folders
        for path in (find_pools(folder) if folder.is_dir() else []) or [folder]
    ]
    return max(_each(found, _verify_one))


def _verify_one(folder: Path) -> int:
    # First check the sizes of its files.
    read_contents(folder)
    pool = open_existing(folder)
    try:
        samples = np.arange(pool.spec.shard.samples)
        samples = samples[pool.ready(samples)]
        progress, corrupt = ProgressBar(len(samples), "samples"), 0
        for begin in range(0, len(samples), SAMPLES_PER_CHECK):
            window = samples[begin : begin + SAMPLES_PER_CHECK]
            corrupt += len(pool.find_corrupt(window, recheck=True))
            progress.add(len(window))
        progress.close()
    finally:
        pool.close()
    again = ", which jobs make again" if corrupt else ""
    print(f"{folder}: {len(samples) - corrupt} whole, {corrupt} corrupt{again}")
    return CORRUPT if corrupt else DONE


def _warm(options: argparse.Namespace) -> int:
    # Imported here, so that the other commands do not wait for TensorFlow.
    import_tensorflow()
    from datacache.command.warming import warm
    from datacache.sources.image_folder import from_folder

    access = _access(options.group)
    chosen = {} if options.extensions is None else {"extensions": options.extensions or None}
    bars: list[ProgressBar] = []

    def started(total: int) -> Callable[[int], None]:
        bars.append(ProgressBar(total, "files"))
        return bars[0].add

    try:
        source = from_folder(options.source, labels=not options.no_labels, **chosen)
        warmed = warm(source, options.disk, started, access)
    finally:
        for bar in bars:
            bar.close()
    counts = warmed.counts
    read = f"{counts.source_reads} files read ({readable_size(counts.source_bytes)})"
    print(f"{warmed.folder}: {read}, {warmed.ready} ready")
    if warmed.ready == warmed.samples:
        return DONE
    print(
        f"{warmed.samples - warmed.ready} files have no room. Make room, or name another disk.",
        file=sys.stderr,
    )
    return NO_ROOM


def _access(group: str | None) -> Access:
    try:
        return Access.of(int(group) if group and group.isdigit() else group)
    except ValueError as error:
        raise CacheError(str(error)) from error


def _rm(options: argparse.Namespace) -> int:
    if not options.folders and not options.all:
        raise CacheError(
            "What to remove must be named. Received: nothing. Name pools, or say --all."
        )
    roots = options.folders or _own_memory(closed=False)
    return max(
        _each(
            [path for root in roots for path in find_pools(root)] if options.all else roots, _rm_one
        ),
        default=DONE,
    )


def _rm_one(folder: Path) -> int:
    report = inspect_pool(folder)
    remove(folder)
    print(f"{folder}: freed {readable_size(report.bytes if report else 0)}")
    return DONE


def _each(folders: Sequence[Path], run: Callable[[Path], int]) -> list[int]:
    """Runs a command for each folder, also after failures; returns the exit statuses."""
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
