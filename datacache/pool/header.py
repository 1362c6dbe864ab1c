"""Header of a store, and checks of its files against it before they are mapped."""

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
UNFINISHED_HEADER = "header.part"
TAIL_BYTES = 64
"""Bytes after the content of each file that identify its store: a whole cache line."""
ID_BYTES = 16
"""Random bytes that identify a store."""


def is_pool(path: Path) -> bool:
    """Returns whether a folder contains a finished store."""
    return (path / HEADER).exists()


def open_pool_folder(path: Path, *, closed: bool = True) -> Directory:
    """Opens the folder of an existing store."""
    try:
        return Directory(path, closed=closed)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise not_a_pool(path) from error


def read_checked_header(directory: Directory) -> dict[str, Any]:
    """Returns the header of a store, after checks of the header and of the sizes of all files."""
    header = _read_header(directory)
    if header["name"] != directory.path.resolve().name:
        # The name is the fingerprint: a different name would serve samples of a different source.
        raise DamagedError(
            f"A store must not be renamed. Received: {directory.path}, created as "
            f"{header['name']}.",
            directory.path,
        )
    tail = file_tail(header)
    for name, size in header["files"].items():
        _check_file(directory, name, size, tail)
    return header


def _read_header(directory: Directory) -> dict[str, Any]:
    path = directory.path
    try:
        with open(directory.open(HEADER, os.O_RDONLY)) as stream:
            header = json.load(stream)
    except FileNotFoundError as error:
        raise not_a_pool(path) from error
    except ValueError as error:
        raise DamagedError(
            f"The header of a store must be JSON. Received: {path / HEADER}, which is not JSON.",
            path,
        ) from error
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise DamagedError(
            "The header of a store must state its format. Received: "
            f"{path / HEADER}, without a format.",
            path,
        )
    # Must precede the digest: a newer format may compute it differently, and such a store must not
    # be rebuilt.
    _check_format(header["format"], path)
    if header.pop("digest", None) != _digest(header):
        raise DamagedError(
            "The header of a store must not be modified. Received: "
            f"{path / HEADER}, which was modified.",
            path,
        )
    return header


def _check_format(found: int, path: Path) -> None:
    """Raises an error for other formats: older stores may be rebuilt, newer ones may not."""
    if found > FORMAT:
        raise CacheError(
            f"The format of a store must be at most {FORMAT}. Received: format {found} in {path}. "
            "Use a newer tfposeidon, or another folder."
        )
    if found < FORMAT:
        raise DamagedError(
            f"The format of a store must be {FORMAT}. Received: format {found} in {path}, created "
            "by an older tfposeidon.",
            path,
        )


def _check_file(directory: Directory, name: str, size: int, tail: bytes) -> None:
    """Checks size and tail of a file: reading beyond its end would kill the process (SIGBUS)."""
    path = directory.path / name
    try:
        handle = directory.open(name, os.O_RDONLY)
    except FileNotFoundError as error:
        raise DamagedError(
            f"All files of a store must exist. Received: no {path}.", directory.path
        ) from error
    try:
        found = os.fstat(handle).st_size
        if found != size + TAIL_BYTES:
            raise DamagedError(
                f"Files of a store must be complete. Received: {path} of {found} bytes, expected "
                f"{size + TAIL_BYTES} bytes.",
                directory.path,
            )
        if os.pread(handle, TAIL_BYTES, size) != tail:
            raise DamagedError(
                f"Files of a store must belong to it. Received: {path} of another store.",
                directory.path,
            )
    finally:
        os.close(handle)


def _digest(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def file_tail(header: dict[str, Any]) -> bytes:
    """Returns the `TAIL_BYTES` bytes after the content of each file of a store."""
    return bytes.fromhex(header["id"]) * (TAIL_BYTES // ID_BYTES)


def not_a_pool(path: Path) -> CacheError:
    """Returns the error for a folder without a store."""
    return CacheError(
        f"A store must have a {HEADER}. Received: {path}, without one. Pass another folder."
    )


def new_header(directory: Directory, files: dict[str, int]) -> dict[str, Any]:
    """Returns the fields of all headers: format, a random id, the folder's name and the files."""
    return {
        "format": FORMAT,
        "id": secrets.token_hex(ID_BYTES),
        "name": directory.path.resolve().name,
        "files": files,
    }


def write_header(directory: Directory, header: dict[str, Any]) -> dict[str, Any]:
    """Writes the header last and durably, which completes a store; returns it as read back."""
    # Write, sync, then rename: after a power loss there is a complete header or none.
    with open(directory.open(UNFINISHED_HEADER, make=True), "w") as stream:
        json.dump(header | {"digest": _digest(header)}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    directory.rename(UNFINISHED_HEADER, HEADER)
    return _read_header(directory)
