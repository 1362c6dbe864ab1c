"""Writes and reads snapshots of a job's state on disk.

Ranks write into a temporary folder, which is renamed once it is complete, and readers verify the
files::

    folder/snapshot-000012/meta.json      epoch, steps, ranks, variables
                           model.npz      arrays equal on all ranks, written by rank 0
                           rank-3.npz     arrays of rank 3 alone

A snapshot is valid from the rename on. Names are never reused, so a killed job leaves the previous
snapshot intact. The newest snapshot has the highest number, regardless of its step.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import tensorflow as tf

from tfposeidon.checks import check_integer
from tfposeidon.communication.topology import Topology
from tfposeidon.communication.wire import Wire, exchange_objects

# Increment this number with every change of a snapshot's contents.
_FORMAT = 11

Arrays = dict[str, list[np.ndarray]]
"""Lists of arrays by name. Files omit empty lists; a name that is not in a file has no arrays."""


class SnapshotError(RuntimeError):
    """Error for a snapshot that could not be written or read; the message has a remedy."""


@dataclass(frozen=True)
class Snapshot:
    """Snapshot in the memory of one rank.

    `meta` and `shared` are equal on all ranks. `own` holds this rank's arrays, or the arrays of all
    ranks if the layout (the assignment of ranks to nodes) has changed.
    """

    meta: dict[str, Any]
    shared: Arrays
    own: dict[int, Arrays]
    same_layout: bool
    folder: Path


class Snapshots:
    """Snapshots in one folder that all ranks share. All methods are collective.

    After a new snapshot is complete, all but the newest `keep` snapshots are deleted.
    """

    def __init__(self, folder: str | os.PathLike[str], wire: Wire, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.wire = wire
        self.keep = check_integer("keep", keep, 1)
        self._writing: tuple[Path, Path, Future[None]] | None = None
        self._unreadable: set[str] = set()
        # Steps since the writing of a snapshot started, and the step of the next poll.
        self._steps = self._next_poll = 0

    def start(self, meta: dict[str, Any], shared: Arrays, own: Arrays) -> None:
        """Starts to write a snapshot with rank 0's `meta` and `shared` in the background.

        An earlier snapshot is finished first. The new snapshot is valid once `poll_at_step` or
        `finish` has completed it. The arrays must not change until then.
        """
        self.finish()
        rank, names = self.wire.topology.rank, self._names()
        number = int(names[-1].rpartition("-")[2]) + 1 if names else 1
        # The token prevents the thread of an interrupted `fit` from writing into this folder.
        mine = [f"snapshot-{number:06d}", secrets.token_hex(4)]
        name, token = exchange_objects(mine, self.wire, "tp.snapshot.name")[0]
        part = self.folder / f".{name}-{token}.part"
        # All ranks wait here, because none may write before rank 0 has created the folder.
        self._together("prepare", lambda: self._make(part) if rank == 0 else None)
        meta = meta | {"format": _FORMAT, "nodes": self.wire.topology.nodes}
        thread = ThreadPoolExecutor(1, "snapshot")
        written = thread.submit(_write_files, part, rank, meta, shared, own)
        self._writing = part, self.folder / name, written
        # The thread ends after its only task.
        thread.shutdown(wait=False)
        self._steps, self._next_poll = 0, 1

    def poll_at_step(self) -> None:
        """Finishes a snapshot that all ranks have written; all ranks call it after each step."""
        # All ranks must poll at the same steps. Each poll is an exchange, so they poll rarely:
        # 1, 2, 4, ... steps after `start`.
        self._steps += 1
        if self._writing is None or self._steps != self._next_poll:
            return
        self._next_poll *= 2
        if all(exchange_objects(self._writing[2].done(), self.wire, "tp.snapshot.poll")):
            self.finish()

    def finish(self) -> None:
        """Waits for the snapshot of `start`; all ranks raise an error if one fails to write."""
        if self._writing is None:
            return
        (part, final, written), self._writing = self._writing, None
        # The folder is renamed only after every rank's file is on disk.
        self._together("write", written.result)
        self._together(
            "finish", lambda: self._rename(part, final) if self.wire.topology.rank == 0 else None
        )

    def read_latest(self) -> Snapshot | None:
        """Returns the newest snapshot that every rank can read, or `None` if no snapshots exist."""
        names: list[str] = exchange_objects(self._names(), self.wire, "tp.snapshots")[0]
        problems: list[str] = []
        # All ranks try the same snapshot, and fall back to an older snapshot if any rank fails.
        for name in reversed(names):
            read = functools.partial(self._read_files, self.folder / name)
            try:
                snapshot: Snapshot = self._on_all(f"tp.read.{name}", read)
            except SnapshotError as error:
                problems.append(f"{name}: {error}")
                self._unreadable.add(name)
                continue
            # Snapshots of the first format have no number.
            found = snapshot.meta.get("format", 1)
            if found != _FORMAT:
                raise SnapshotError(
                    f"A checkpoint must have format {_FORMAT}. Received: format {found} in "
                    f"{self.folder}, from another release of tfposeidon. Resume with that "
                    "release, use another folder, or use Checkpoint(..., resume=False)."
                )
            return snapshot
        if problems:
            raise SnapshotError(
                f"A snapshot must be readable on every rank. Received: {'; '.join(problems)}. Make "
                f"{self.folder} visible to all nodes, or empty it to start from the beginning."
            )
        return None

    def _read_files(self, folder: Path) -> Snapshot:
        meta = json.loads((folder / "meta.json").read_text())
        then, now = Topology(0, tuple(map(tuple, meta["nodes"]))), self.wire.topology
        same_layout = then.nodes == now.nodes
        ranks = [now.rank] if same_layout else range(then.size)
        own = {rank: _load(folder / f"rank-{rank}.npz") for rank in ranks}
        return Snapshot(meta, _load(folder / "model.npz"), own, same_layout, folder)

    def read_all_ranks(self, snapshot: Snapshot) -> dict[int, Arrays]:
        """Returns the arrays of all ranks; all ranks raise an error if one cannot read files."""
        if not snapshot.same_layout:
            return snapshot.own
        ranks = itertools.chain(*snapshot.meta["nodes"])
        files = {rank: snapshot.folder / f"rank-{rank}.npz" for rank in ranks}
        try:
            own: dict[int, Arrays] = self._on_all(
                "tp.read_all_ranks", lambda: {rank: _load(path) for rank, path in files.items()}
            )
        except SnapshotError as error:
            raise SnapshotError(
                "The files of all ranks must be readable on every rank. Received: "
                f"{error}. Make {self.folder} visible to all nodes, or use the scheme and "
                "bucket_bytes of the snapshot."
            ) from error
        return own

    def _names(self) -> list[str]:
        # The folder may also contain a user's copies and archives, under other names.
        found = self.folder.glob("snapshot-*") if self.folder.exists() else ()
        name = re.compile(r"snapshot-\d{6,}")
        return sorted(one.name for one in found if name.fullmatch(one.name) and one.is_dir())

    def _rename(self, part: Path, final: Path) -> None:
        # The rename is atomic, so a killed job leaves the folder under one of its two names.
        os.replace(part, final)
        _sync(self.folder)
        readable = [name for name in self._names() if name not in self._unreadable]
        for name in readable[: -self.keep]:
            shutil.rmtree(self.folder / name)

    def _make(self, part: Path) -> None:
        # Delete folders of killed jobs first, to free disk space.
        for leftover in self.folder.glob(".snapshot-*.part"):
            # A thread may still write into this folder if a server saves again after a failure.
            shutil.rmtree(leftover, ignore_errors=True)
        part.mkdir(parents=True)

    def _together(self, stage: str, action: Callable[[], Any]) -> None:
        """Runs an action on this rank; all ranks raise an error if it fails on any."""
        try:
            self._on_all(f"tp.snapshot.{stage}", action)
        except SnapshotError as error:
            names = self._names()
            last = f"the last complete snapshot is {names[-1]}" if names else ""
            raise SnapshotError(
                f"A snapshot could not be written to {self.folder} ({error}); "
                f"{last or 'no complete snapshot exists'}. Free disk space or use another folder, "
                "and start again."
            ) from error

    def _on_all(self, name: str, action: Callable[[], Any]) -> Any:
        """Returns the result of an action; all ranks raise an error if the action fails on any."""
        result = problem = cause = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001, because all ranks must take part in the exchange.
            problem, cause = f"{type(error).__name__}: {error}", error
        everybody = exchange_objects(problem, self.wire, name)
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(everybody) if text]:
            raise SnapshotError("; ".join(failed)) from cause
        return result


def _write_files(
    folder: Path, rank: int, meta: dict[str, Any], shared: Arrays, own: Arrays
) -> None:
    save_arrays(folder / f"rank-{rank}.npz", own)
    if rank == 0:
        save_arrays(folder / "model.npz", shared)
        _write(folder / "meta.json", lambda stream: stream.write(json.dumps(meta).encode()))
    # Sync on every rank, because each has created directory entries, and ranks may be on different
    # hosts.
    _sync(folder)


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Writes lists of arrays and syncs them to disk."""
    named: dict[str, Any] = {
        f"{name}.{i}": one for name, found in arrays.items() for i, one in enumerate(found)
    }
    _write(path, lambda stream: np.savez(stream, **named))


def _write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    with path.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())


def _load(path: Path) -> Arrays:
    found: Arrays = defaultdict(list)
    with path.open("rb") as stream, np.load(stream) as archive:
        for name in archive.files:
            # Reading whole arrays makes the archive verify their CRCs.
            found[name.rpartition(".")[0]].append(archive[name])
    return found


def _sync(folder: Path) -> None:
    # A file's name survives a power loss only if its folder is synced.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def values_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """Returns the values of variables as arrays that a snapshot can store."""
    tensors = [tf.convert_to_tensor(v) for v in variables]
    # NumPy's files do not support bfloat16; float32 represents all of its values.
    return [(tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t).numpy() for t in tensors]


def mismatch(received: str) -> SnapshotError:
    """Returns the error for a snapshot that does not match the model."""
    return SnapshotError(
        f"A checkpoint must match the model and its optimizers. Received: {received}. Use another "
        "folder, or Checkpoint(..., resume=False)."
    )


def assign_values(variables: Sequence[Any], values: Sequence[np.ndarray]) -> None:
    """Assigns arrays of a snapshot to variables of the same shapes."""
    if [tuple(variable.shape) for variable in variables] != [value.shape for value in values]:
        raise mismatch(
            f"{len(values)} arrays, which do not fit the shapes of {len(variables)} variables"
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))
