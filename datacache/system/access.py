"""Opens folders and files that other users cannot read or write.

In `/dev/shm`, any user may create files under any name, and replace them between a check and its
use. Owner and mode are therefore read from open descriptors, never from a name. Links are not
followed, and files are opened relative to the descriptor of their folder.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import stat
from pathlib import Path
from typing import Literal, Self

from datacache.errors import CacheError
from datacache.system.descriptors import Descriptor
from datacache.system.room import means_full

log = logging.getLogger("datacache")
FOLDER_MODE, FILE_MODE = 0o700, 0o600
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
WITHOUT_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC
Others = Literal["refused", "removed", "ignored"]
"""Handling of other users' permissions; `"removed"` still refuses permissions to write."""


class Directory(Descriptor):
    """Open folder of this user, and the files in it.

    Opening raises `FileNotFoundError` for a missing folder, and `CacheError` for a folder that is a
    link, belongs to another user, or is accessible to other users.
    """

    def __init__(self, path: Path, others: Others = "refused", *, new: bool = False) -> None:
        self.path, self._others = path, others
        super().__init__(_open(path, path, os.O_RDONLY | os.O_DIRECTORY))
        self._check(self, path, stat.S_IFDIR, FOLDER_MODE, new)

    @classmethod
    def create(cls, path: Path) -> Self:
        """Opens a folder, after creating it and all its ancestors if necessary."""
        while True:
            try:
                return cls(path, "removed", new=_make(path))
            except FileNotFoundError:
                # Another process may have removed the folder in between.
                continue
            except OSError as error:
                # Raise this error unchanged, because the caller skips a tier without space.
                if means_full(error):
                    raise
                raise _unwritable(path, error) from error

    def open(self, name: str, flags: int = os.O_RDWR, *, make: bool = False) -> Descriptor:
        """Opens a file in the folder; the caller owns the descriptor."""
        path, new = self.path / name, False
        try:
            handle = _open(path, name, flags, self.fileno())
        except FileNotFoundError:
            if not make:
                raise
            new, handle = True, _open(path, name, flags | os.O_CREAT, self.fileno())
        return self._check(Descriptor(handle), path, stat.S_IFREG, FILE_MODE, new)

    def names(self) -> set[str]:
        return set(os.listdir(self.fileno()))

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fileno())

    def rename(self, name: str, new: str) -> None:
        """Renames a file durably."""
        os.replace(name, new, src_dir_fd=self.fileno(), dst_dir_fd=self.fileno())
        # Sync the folder, which contains the name: a power failure could otherwise undo the change.
        os.fsync(self.fileno())

    def stat(self, name: str) -> os.stat_result:
        """Returns the status of a file in the folder; links are not followed."""
        return os.stat(name, dir_fd=self.fileno(), follow_symlinks=False)

    @property
    def is_gone(self) -> bool:
        """True if the folder's path is missing or leads to another folder."""
        try:
            return not os.path.samestat(
                os.stat(self.path, follow_symlinks=False), os.fstat(self.fileno())
            )
        except FileNotFoundError:
            return True

    def _check(self, handle: Descriptor, path: Path, kind: int, mode: int, new: bool) -> Descriptor:
        """Returns the descriptor if owner, type and mode are as expected; otherwise closes it."""
        with contextlib.ExitStack() as on_error:
            on_error.push(handle)
            status = os.fstat(handle.fileno())
            _refuse_others(path, status, kind)
            surplus = (found := stat.S_IMODE(status.st_mode)) & ~mode
            if new:
                # Set the mode regardless of the umask.
                os.fchmod(handle.fileno(), mode)
            # Do not accept a file that other users could write: they may have changed it already.
            elif surplus and self._others == "removed" and not surplus & OTHERS_WRITE:
                os.fchmod(handle.fileno(), found & mode)
                log.warning(
                    "datacache: removed permissions of other users, who could read %s: mode is "
                    "%o, was %o",
                    path,
                    found & mode,
                    found,
                )
            elif surplus and self._others != "ignored":
                name = shlex.quote(str(self.path))
                raise CacheError(
                    f"A store must be accessible to user {os.geteuid()} only. Received: {path} "
                    f"with mode {found:o}, expected mode {mode:o}. If no other user has written "
                    f"there, correct it: chmod -R go-rwxs {name}; otherwise remove it: "
                    f"python -m datacache rm --all {name}"
                )
            on_error.pop_all()
        return handle


def _make(path: Path) -> bool:
    """Creates a folder and its ancestors; returns whether the folder is new."""
    if not path.parent.exists():
        Directory.create(path.parent).close()
    try:
        path.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        return False
    except FileNotFoundError as error:
        # Virtual file systems of the kernel, such as /proc, raise this error.
        raise _unwritable(path, error) from error
    return True


def _open(path: Path, name: Path | str, flags: int, folder: int | None = None) -> int:
    try:
        return os.open(name, flags | WITHOUT_LINKS, FILE_MODE, dir_fd=folder)
    except OSError as error:
        # For a link, the kernel returns ENOTDIR if a folder was requested, and ELOOP otherwise.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise CacheError(
                f"A store must not be or contain a link. Received: {path}, a link to "
                f"{os.readlink(path)}. Check who created it, and remove it or pass another folder."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS):
            raise _unwritable(path, error) from error
        raise


def _unwritable(path: Path, error: OSError) -> CacheError:
    return CacheError(
        f"The folder of a store must be writable. Received: {path} ({error.strerror}). "
        "Pass another folder."
    )


def _refuse_others(path: Path, status: os.stat_result, kind: int) -> None:
    if stat.S_IFMT(status.st_mode) != kind:
        raise CacheError(
            f"A store must consist of a folder and regular files. Received: {path}, which has "
            "another file type. Remove it."
        )
    if status.st_uid != os.geteuid():
        raise CacheError(
            f"A store must be owned by its user. Received: {path}, owned by user {status.st_uid}, "
            f"expected user {os.geteuid()}. Check who created it, and remove it or pass another "
            "folder."
        )
