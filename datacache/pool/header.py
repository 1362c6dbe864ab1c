"""What a pool says of itself, and whether its files are as it says: before anything is mapped or believed."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from datacache.errors import CacheError, DamagedError
from datacache.system.access import Directory

FORMAT = 2
HEADER = "header.json"
PART = "header.part"
TAIL = 64
"""Bytes behind each file's own, which say of which pool it is: whole cache lines."""
ID = 16
"""Bytes drawn for each pool that is made."""


def is_pool(path: Path) -> bool:
    """Whether there is a pool."""
    return (path / HEADER).exists()


def opened(path: Path, *, closed: bool = True) -> Directory:
    """The open folder of a pool that was made before; see `Directory`.

    Raises:
      CacheError: If there is none, too.
    """
    try:
        return Directory(path, closed=closed)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise no_cache(path) from error


def check(directory: Directory) -> dict[str, Any]:
    """What a pool's folder says of it.

    Raises:
      CacheError: If it is none, or of a newer format.
      DamagedError: If it is not as it was made.
    """
    about = _header(directory)
    if about["name"] != directory.path.resolve().name:
        raise DamagedError(
            f"A cache must stay under its name. Received: {directory.path}, made as {about['name']}.",
            directory.path,
        )
    wanted = tail(about)
    for name, size in about["files"].items():
        _check_file(directory, name, size, wanted)
    return about


def _header(directory: Directory) -> dict[str, Any]:
    path = directory.path
    try:
        with open(directory.open(HEADER, os.O_RDONLY)) as stream:
            about = json.load(stream)
    except FileNotFoundError as error:
        raise no_cache(path) from error
    except ValueError as error:
        raise DamagedError(
            f"A cache must be whole. Received: {path / HEADER}, which is no JSON.", path
        ) from error
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise DamagedError(
            f"A cache must say what it holds. Received: {path / HEADER}, which does not.", path
        )
    if about["format"] > FORMAT:
        raise CacheError(
            f"A cache must be of a format up to {FORMAT}. Received: format {about['format']} in {path}. Use a newer "
            "tfposeidon, or another folder."
        )
    if about["format"] < FORMAT:
        raise DamagedError(
            f"A cache must be of format {FORMAT}. Received: format {about['format']} in {path}, which an older "
            "tfposeidon has made.",
            path,
        )
    if about.pop("digest", None) != _digest(about):
        raise DamagedError(
            f"A cache must be as it was made. Received: {path / HEADER}, which was changed.", path
        )
    return about


def _check_file(directory: Directory, name: str, size: int, tail: bytes) -> None:
    """Reading beyond the end of a file would kill the process that maps it."""
    path = directory.path / name
    try:
        handle = directory.open(name, os.O_RDONLY)
    except FileNotFoundError as error:
        raise DamagedError(
            f"A pool's files must be there. Received: no {path}.", directory.path
        ) from error
    try:
        found = os.fstat(handle).st_size
        if found != size + TAIL:
            raise DamagedError(
                f"A pool's files must be whole. Received: {path} of {found} bytes, not {size + TAIL}.",
                directory.path,
            )
        if os.pread(handle, TAIL, size) != tail:
            raise DamagedError(
                f"A pool's files must be its own. Received: {path}, of another pool.",
                directory.path,
            )
    finally:
        os.close(handle)


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def tail(about: dict[str, Any]) -> bytes:
    """What stands behind each file of a pool."""
    return bytes.fromhex(about["id"]) * (TAIL // ID)


def no_cache(path: Path) -> CacheError:
    """For a folder that is none."""
    return CacheError(
        f"A cache must have a {HEADER}. Received: {path}, without one. Name another folder."
    )


def drawn(directory: Directory, files: dict[str, int]) -> dict[str, Any]:
    """What a new pool with files of so many bytes says first."""
    return {
        "format": FORMAT,
        "id": secrets.token_hex(ID),
        "name": directory.path.resolve().name,
        "files": files,
    }


def write(directory: Directory, about: dict[str, Any]) -> dict[str, Any]:
    """Says that there is a pool, last of all and for good; returns it as JSON has it."""
    with open(directory.open(PART, make=True), "w") as stream:
        json.dump(about | {"digest": _digest(about)}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    directory.rename(PART, HEADER)
    return _header(directory)
