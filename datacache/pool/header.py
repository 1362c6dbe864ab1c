"""Header of a store, and checks of its files against it before they are mapped."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from datacache.errors import CacheError, DamagedError
from datacache.system.access import Directory, Others

FORMAT = 2
HEADER = "header.json"
UNFINISHED_HEADER = "header.part"
LOCK_FILES = {"users", "claims"}
"""Files whose locks other processes may hold: created first, retained when a store is rebuilt, and
removed last. A lock on a replaced file would not exclude other processes."""
FILES = LOCK_FILES | {
    *("lock", "samples", "words", "heap", "end", "index", UNFINISHED_HEADER, HEADER)
}
"""Names of all files of a store in any version."""
TAIL_BYTES = 64
"""Bytes after the content of each file that identify its store: a whole cache line."""
ID_BYTES = 16
"""Random bytes that identify a store."""


def is_pool(path: Path) -> bool:
    """Returns whether a folder contains a finished store."""
    return (path / HEADER).exists()


def open_pool_folder(path: Path, others: Others = "refused") -> Directory:
    """Opens the folder of an existing store."""
    try:
        return Directory(path, others)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise not_a_pool(path) from error


def not_a_pool(path: Path) -> CacheError:
    """Returns the error for a folder without a store."""
    return CacheError(
        f"A store must have a {HEADER}. Received: {path}, without one. Pass another folder."
    )


def read_checked_header(directory: Directory) -> dict[str, Any]:
    """Returns the header of a store, after checks of the header and of the sizes of all files."""
    header, path = _read_header(directory), directory.path
    if header["name"] != path.resolve().name:
        # The name is the fingerprint: a different name would serve samples of a different source.
        raise DamagedError(
            f"A store must not be renamed. Received: {path}, created as {header['name']}.", path
        )
    tail = file_tail(header)
    for name, size in header["files"].items():
        _check_file(directory, name, size, tail)
    return header


def file_tail(header: dict[str, Any]) -> bytes:
    """Returns the bytes at the end of each file of a store."""
    return bytes.fromhex(header["id"]) * (TAIL_BYTES // ID_BYTES)


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
    with directory.open(UNFINISHED_HEADER, make=True) as handle:
        with open(handle.fileno(), "w", closefd=False) as stream:
            json.dump(header | {"digest": _digest(header)}, stream)
        os.fsync(handle.fileno())
    directory.rename(UNFINISHED_HEADER, HEADER)
    return _read_header(directory)


def _read_header(directory: Directory) -> dict[str, Any]:
    folder, path = directory.path, directory.path / HEADER
    try:
        header = json.loads(directory.read(HEADER))
    except FileNotFoundError as error:
        names = directory.names()
        if not names or names - FILES:
            raise not_a_pool(folder) from error
        raise CacheError(
            f"A store must be complete. Received: {folder}, which is being created, or "
            "is left of a killed process. Wait, or remove it with `python -m datacache rm`."
        ) from error
    except ValueError as error:
        raise DamagedError(
            f"The header of a store must be JSON. Received: {path}, which is not JSON.", folder
        ) from error
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise DamagedError(
            f"The header of a store must state its format. Received: {path}, without a format.",
            folder,
        )
    # Must precede the digest: a newer format may compute it differently, and such a store must not
    # be rebuilt.
    _check_format(header["format"], folder)
    if header.pop("digest", None) != _digest(header):
        raise DamagedError(
            f"The header of a store must not be modified. Received: {path}, which was modified.",
            folder,
        )
    return header


def _check_format(found: int, path: Path) -> None:
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
    folder, path = directory.path, directory.path / name
    try:
        handle = directory.open(name, os.O_RDONLY)
    except FileNotFoundError as error:
        raise DamagedError(
            f"All files of a store must exist. Received: no {path}.", folder
        ) from error
    with handle:
        found = os.fstat(handle.fileno()).st_size
        if found != size + TAIL_BYTES:
            raise DamagedError(
                f"Files of a store must be complete. Received: {path} of {found} bytes, expected "
                f"{size + TAIL_BYTES} bytes.",
                folder,
            )
        if os.pread(handle.fileno(), TAIL_BYTES, size) != tail:
            raise DamagedError(
                f"Files of a store must belong to it. Received: {path} of another store.", folder
            )


def _digest(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
