"""Folders that other users cannot read or write.

In `/dev/shm`, any user may create files under any name, and replace them between a check and its
use. Owner and mode are therefore read from open descriptors, never from a name. Folders and files
are opened without following links, files relative to the descriptor of their folder, and each is
checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import grp
import logging
import os
import pwd
import secrets
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from datacache.errors import CacheError

log = logging.getLogger("datacache")
OWN_FOLDER, OWN_FILE = 0o700, 0o600
GROUP_FOLDER, GROUP_FILE = 0o2770, 0o660
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
WITHOUT_LINKS = os.O_NOFOLLOW | os.O_CLOEXEC
AT_WORKING_DIRECTORY, NO_REPLACE = -100, 1
"""Arguments of renameat2(2), which Python does not define."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Users who may read and write a store: one user, or the members of `group` as well.

    Example:
      >>> Access.of(None).users == f"user {os.geteuid()}"
      True
    """

    group: int | None = None

    @classmethod
    def of(cls, group: str | int | None) -> Access:
        """Returns the access for a group."""
        if group is None:
            return cls()
        try:
            found = grp.getgrnam(group) if isinstance(group, str) else grp.getgrgid(group)
        except KeyError as error:
            raise ValueError(
                f"`group` must be the name or number of a group. Received: group={group!r}"
            ) from error
        # Root may assign files to any group.
        if os.geteuid() and found.gr_gid not in (os.getegid(), *os.getgroups()):
            raise ValueError(
                f"`group` must be a group of this user. Received: group={group!r}. List them: id"
            )
        return cls(group=found.gr_gid)

    @classmethod
    def of_folder(cls, status: os.stat_result) -> Access:
        """Returns the access that a folder's mode grants."""
        return cls(group=status.st_gid if stat.S_IMODE(status.st_mode) == GROUP_FOLDER else None)

    @property
    def folder_mode(self) -> int:
        """Permissions of folders; the set-group-ID bit assigns new files in it to the group."""
        return OWN_FOLDER if self.group is None else GROUP_FOLDER

    @property
    def file_mode(self) -> int:
        """Permissions of files."""
        return OWN_FILE if self.group is None else GROUP_FILE

    @property
    def users(self) -> str:
        """Description of the users, for messages."""
        return f"user {os.geteuid()}" if self.group is None else f"members of group {self.group}"

    def includes(self, user: int) -> bool:
        """Returns whether files of a user are trusted."""
        if user == os.geteuid():
            return True
        if self.group is None:
            return False
        # Root can write there in any case.
        return user == 0 or self.group in _groups(user)

    def give(self, handle: int, mode: int) -> None:
        """Sets group and permissions of a new file or folder, whatever the umask is."""
        if self.group is not None:
            os.fchown(handle, -1, self.group)
        os.fchmod(handle, mode)


PRIVATE = Access()


def _groups(user: int) -> list[int]:
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        # Users of other containers may be unknown here.
        return []
    return os.getgrouplist(entry.pw_name, entry.pw_gid)


class Directory:
    """Open folder, and the files in it.

    It raises `FileNotFoundError` for a missing folder, and `CacheError` for one that is a link,
    belongs to another user, or is accessible to others.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as root:
      ...     with Directory.create(Path(root) / "pool", PRIVATE) as directory:
      ...         os.close(directory.open("words", make=True))
      ...         directory.names(), oct(directory.stat("words").st_mode & 0o777)
      ({'words'}, '0o600')
    """

    def __init__(self, path: Path, access: Access | None = None, *, closed: bool = True) -> None:
        self.path, self._closed, self._mends = path, closed, access is not None
        self.descriptor = _open(path, path, os.O_RDONLY | os.O_DIRECTORY)
        self.access = access or Access.of_folder(os.fstat(self.descriptor))
        self._check(self.descriptor, path, stat.S_IFDIR, self.access.folder_mode)

    @classmethod
    def create(cls, path: Path, access: Access) -> Self:
        """Opens a folder, after creating it and all its ancestors if necessary."""
        while True:
            try:
                _make(path, access)
                return cls(path, access)
            except FileNotFoundError:
                # Another process may have removed it in between.
                continue
            except OSError as error:
                raise _unwritable(path, error) from error

    def open(self, name: str, flags: int = os.O_RDWR, *, make: bool = False) -> int:
        """Opens a file in the folder; the caller closes the descriptor."""
        path = self.path / name
        try:
            handle = _open(path, name, flags, self.descriptor)
        except FileNotFoundError:
            if not make:
                raise
            handle = _open(path, name, flags | os.O_CREAT, self.descriptor, self.access.file_mode)
            self.access.give(handle, self.access.file_mode)
        self._check(handle, path, stat.S_IFREG, self.access.file_mode)
        return handle

    def names(self) -> set[str]:
        """Returns the names of all files in the folder."""
        return set(os.listdir(self.descriptor))

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def rename(self, name: str, new: str) -> None:
        """Renames a file durably."""
        os.replace(name, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        # The name is content of the folder, and would be lost at a power loss without this.
        os.fsync(self.descriptor)

    def stat(self, name: str) -> os.stat_result:
        """Returns the status of a file in the folder; links are not followed."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    @property
    def is_gone(self) -> bool:
        """True if the folder's path is missing or leads to another folder."""
        try:
            return not os.path.samestat(
                os.stat(self.path, follow_symlinks=False), os.fstat(self.descriptor)
            )
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Closes the folder; files that were opened in it stay open."""
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, handle: int, path: Path, kind: int, mode: int) -> None:
        try:
            status = os.fstat(handle)
            _refuse_others(path, status, self.access, kind)
            if self._closed and self._mends and _tighten(handle, path, status, self.access, mode):
                status = os.fstat(handle)
            if self._closed:
                _refuse_open(path, self.path, status, self.access, mode)
        except CacheError:
            os.close(handle)
            raise


def _make(path: Path, access: Access) -> None:
    """Creates a folder and its ancestors if they do not exist."""
    if not path.parent.exists():
        Directory.create(path.parent, access).close()
    try:
        if access.group is None or not _make_beside(path, access):
            _make_accessible(path, access)
    except FileExistsError:
        return
    except FileNotFoundError as error:
        # Virtual file systems of the kernel, such as /proc, raise this error.
        raise _unwritable(path, error) from error


def _make_accessible(path: Path, access: Access) -> None:
    # Private at first: with group permissions it would be accessible to this user's primary group
    # until its group is set.
    path.mkdir(mode=OWN_FOLDER)
    handle = _open(path, path, os.O_RDONLY | os.O_DIRECTORY)
    access.give(handle, access.folder_mode)
    os.close(handle)


def _make_beside(path: Path, access: Access) -> bool:
    """Creates the folder of a group under a temporary name, and renames it once its group is set.

    Otherwise, members of the group that open it concurrently would be refused. Returns `False` if
    the file system cannot rename without replacing.
    """
    # This only saves work, because the rename refuses to replace a folder.
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    _make_accessible(beside, access)
    try:
        if rename_new(beside, path):
            return True
    except BaseException:
        beside.rmdir()
        raise
    beside.rmdir()
    return False


def rename_new(old: Path, new: Path) -> bool:
    """Renames a folder; unlike `os.rename`, it does not replace an empty one of the new name.

    Returns `False` if the file system or the C library does not support this.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(old), os.fsencode(new)
    if rename(AT_WORKING_DIRECTORY, names[0], AT_WORKING_DIRECTORY, names[1], NO_REPLACE) == 0:
        return True
    number = ctypes.get_errno()
    # Some file systems, such as NFS, do not support the flag.
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number), str(new))


def _open(
    path: Path, name: Path | str, flags: int, folder: int | None = None, mode: int = 0
) -> int:
    try:
        return os.open(name, flags | WITHOUT_LINKS, mode, dir_fd=folder)
    except OSError as error:
        # The error for a link is ENOTDIR if a folder was requested, and ELOOP otherwise.
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
        "Pass another folder, or pass `group` to share one."
    )


def _refuse_others(path: Path, status: os.stat_result, access: Access, kind: int) -> None:
    if stat.S_IFMT(status.st_mode) != kind:
        raise CacheError(
            f"A store must consist of a folder and regular files. Received: {path}, which has "
            "another file type. Remove it."
        )
    if not access.includes(status.st_uid):
        raise CacheError(
            f"A store must be owned by its users. Received: {path}, owned by user {status.st_uid}, "
            f"expected {access.users}. Check who created it, and remove it or pass another folder."
        )


def _tighten(handle: int, path: Path, status: os.stat_result, access: Access, mode: int) -> bool:
    """Removes permissions of other users who could only read; returns whether it did.

    A file that others could write is refused instead: they may have written there already.
    """
    found = stat.S_IMODE(status.st_mode)
    surplus = found & ~mode
    mine = status.st_uid == os.geteuid() and access.group in (None, status.st_gid)
    if not mine or not surplus or surplus & OTHERS_WRITE:
        return False
    os.fchmod(handle, found & mode)
    log.warning(
        "datacache: removed permissions of other users, who could read %s: mode is %o, was %o",
        path,
        found & mode,
        found,
    )
    return True


def _refuse_open(
    path: Path, folder: Path, status: os.stat_result, access: Access, mode: int
) -> None:
    found = stat.S_IMODE(status.st_mode)
    if found & ~mode or access.group not in (None, status.st_gid):
        name = shlex.quote(str(folder))
        mend = f"chmod -R go-rwx {name}"
        if access.group is not None:
            mend = (
                f"chgrp -R {access.group} {name} && chmod -R g+rwX,o-rwx {name} && chmod g+s {name}"
            )
        raise CacheError(
            f"A store must be accessible to {access.users} only. Received: {path} with mode "
            f"{found:o} and group {status.st_gid}, expected mode {mode:o}. If no other user has "
            f"written there, correct it: {mend}; otherwise remove it: python -m datacache rm --all "
            f"{name}. To share with a group, pass `group`."
        )
