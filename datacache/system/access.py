"""Opens folders and files that other users cannot read or write.

In `/dev/shm`, any user may create files under any name, and replace them between a check and its
use. Owner and mode are therefore read from open descriptors, never from a name. Links are not
followed, and files are opened relative to the descriptor of their folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from pathlib import Path
from typing import Self

from datacache.errors import CacheError
from datacache.system.descriptors import Descriptor
from datacache.system.room import means_full

FOLDER_MODE, FILE_MODE = 0o700, 0o600
WITHOUT_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC


class Directory(Descriptor):
    """Open folder of this user, and the files in it.

    Opening raises `FileNotFoundError` for a missing folder, and `CacheError` for a folder that is a
    link, belongs to another user, or is accessible to other users.
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        self.path = path
        super().__init__(_open(path, path, os.O_RDONLY | os.O_DIRECTORY))
        _checked(self, path, stat.S_IFDIR, FOLDER_MODE, new)

    @classmethod
    def create(cls, path: Path) -> Self:
        """Opens a folder, after creating it and all its ancestors if necessary."""
        while True:
            try:
                return cls(path, new=_make(path))
            except FileNotFoundError:
                # Another process may have removed the folder in between.
                continue
            except OSError as error:
                # Raise this error unchanged, because the caller skips a tier without space.
                if means_full(error):
                    raise
                raise _unwritable(path, error) from error

    def open(self, name: str, flags: int = os.O_RDWR) -> Descriptor:
        """Opens a file in the folder, or creates it with `os.O_CREAT`; the caller owns it."""
        path = self.path / name
        handle = Descriptor(_open(path, name, flags, self.fileno()))
        return _checked(handle, path, stat.S_IFREG, FILE_MODE, bool(flags & os.O_CREAT))

    def names(self) -> set[str]:
        return set(os.listdir(self.fileno()))

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fileno())

    @property
    def is_gone(self) -> bool:
        """True if the folder's path is missing or leads to another folder."""
        try:
            return not os.path.samestat(
                os.stat(self.path, follow_symlinks=False), os.fstat(self.fileno())
            )
        except FileNotFoundError:
            return True


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


def _checked(handle: Descriptor, path: Path, kind: int, mode: int, new: bool) -> Descriptor:
    """Returns the descriptor if type, owner and mode are as expected; otherwise closes it."""
    with contextlib.ExitStack() as on_error:
        on_error.push(handle)
        status = os.fstat(handle.fileno())
        if stat.S_IFMT(status.st_mode) != kind:
            raise CacheError(
                f"A store must consist of a folder and regular files. Received: {path}, which has "
                "another file type. Remove it."
            )
        if status.st_uid != os.geteuid():
            raise CacheError(
                f"A store must be owned by its user. Received: {path}, owned by user "
                f"{status.st_uid}, expected user {os.geteuid()}. Check who created it, and remove "
                "it or pass another folder."
            )
        found = stat.S_IMODE(status.st_mode)
        if new:
            # Set the mode regardless of the umask.
            os.fchmod(handle.fileno(), mode)
        elif found & ~mode & 0o777:
            # Other users may have changed the file already.
            folder = shlex.quote(str(path if kind == stat.S_IFDIR else path.parent))
            raise CacheError(
                f"A store must be accessible to user {os.geteuid()} only. Received: {path} with "
                f"mode {found:o}, expected mode {mode:o}. If no other user has written there, "
                f"correct it: chmod -R go-rwxs {folder}; otherwise pass another folder."
            )
        on_error.pop_all()
    return handle
