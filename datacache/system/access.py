"""Folders that others cannot read or write.

In `/dev/shm` everybody may make anything under any name, and exchange it between a check and its
use. So owner and mode are read from what is open and never from a name: folders and files are
opened without following links, files relative to the descriptor of their folder, and each is
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
"""Arguments of renameat2(2), for which Python has no names."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Users who may read and write a pool.

    Attributes:
      group: Id of the group whose members may read and write, too; `None` for the user alone.

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
        # Root may give files to any group.
        if os.geteuid() and found.gr_gid not in (os.getegid(), *os.getgroups()):
            raise ValueError(
                f"`group` must be one that this user is in. Received: group={group!r}. See: id"
            )
        return cls(group=found.gr_gid)

    @classmethod
    def of_folder(cls, status: os.stat_result) -> Access:
        """Returns the access that a folder has been given."""
        return cls(group=status.st_gid if stat.S_IMODE(status.st_mode) == GROUP_FOLDER else None)

    @property
    def folder_mode(self) -> int:
        """Permissions of folders; the set-group-ID bit makes new files in it the group's."""
        return OWN_FOLDER if self.group is None else GROUP_FOLDER

    @property
    def file_mode(self) -> int:
        """Permissions of files."""
        return OWN_FILE if self.group is None else GROUP_FILE

    @property
    def users(self) -> str:
        """The users in words, for messages."""
        return f"user {os.geteuid()}" if self.group is None else f"members of group {self.group}"

    def includes(self, user: int) -> bool:
        """Returns whether files made by a user are trusted."""
        if user == os.geteuid():
            return True
        if self.group is None:
            return False
        # Root could write there anyway.
        return user == 0 or self.group in _groups(user)

    def give(self, handle: int, mode: int) -> None:
        """Sets group and permissions of what was just made, whatever the umask is."""
        if self.group is not None:
            os.fchown(handle, -1, self.group)
        os.fchmod(handle, mode)


PRIVATE = Access()


def _groups(user: int) -> list[int]:
    try:
        entry = pwd.getpwuid(user)
    except KeyError:
        # Users of other containers need not be known here.
        return []
    return os.getgrouplist(entry.pw_name, entry.pw_gid)


class Directory:
    """An open folder, and the files in it.

    Attributes:
      path: Path of the folder.
      access: Users who may read and write the folder.
      descriptor: Descriptor of the folder.

    Raises:
      FileNotFoundError: If there is no such folder.
      CacheError: If it is a link, belongs to another user, or is open to others.

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
        """Opens a folder, which is made if there is none, with all folders above it.

        Returns:
          The open folder.
        """
        while True:
            try:
                _make(path, access)
                return cls(path, access)
            except FileNotFoundError:
                # Somebody may have removed it in between.
                continue
            except OSError as error:
                raise _unwritable(path, error) from error

    def open(self, name: str, flags: int = os.O_RDWR, *, make: bool = False) -> int:
        """Opens a file in the folder.

        Returns:
          Descriptor of the file, which the caller closes.
        """
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
        """Removes a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def rename(self, name: str, new: str) -> None:
        """Gives a file another name, durably."""
        os.replace(name, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        # The name is content of the folder, which a loss of power would undo otherwise.
        os.fsync(self.descriptor)

    def stat(self, name: str) -> os.stat_result:
        """Returns the status of a file in the folder; links are not followed."""
        return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)

    @property
    def is_gone(self) -> bool:
        """True if the folder's path leads elsewhere by now, or nowhere."""
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
    """Makes a folder, and those above it, unless there is one."""
    if not path.parent.exists():
        Directory.create(path.parent, access).close()
    try:
        if access.group is None or not _make_beside(path, access):
            _make_accessible(path, access)
    except FileExistsError:
        return
    except FileNotFoundError as error:
        # The kernel's own file systems, such as /proc, answer so.
        raise _unwritable(path, error) from error


def _make_accessible(path: Path, access: Access) -> None:
    # Closed at first: with a group's permissions it would be open to this user's own group until it
    # is given to the other one.
    path.mkdir(mode=OWN_FOLDER)
    handle = _open(path, path, os.O_RDONLY | os.O_DIRECTORY)
    access.give(handle, access.folder_mode)
    os.close(handle)


def _make_beside(path: Path, access: Access) -> bool:
    """Makes the folder of a group under another name, and renames it once it is the group's.

    Members of the group that open it at the same time would else find it closed to them.

    Returns:
      `False` where the file system cannot rename without replacing.
    """
    # Saves the work; renaming refuses to replace it anyway.
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
    """Renames a folder; unlike `os.rename` it does not replace an empty one of the new name.

    Returns:
      `False` if the file system or the C library cannot do that.
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
        # A link is ENOTDIR where a folder was asked for, and ELOOP otherwise.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise CacheError(
                f"A cache must not lie behind links. Received: {path}, a link to "
                f"{os.readlink(path)}. Look who made it, and remove it or name another folder."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS):
            raise _unwritable(path, error) from error
        raise


def _unwritable(path: Path, error: OSError) -> CacheError:
    return CacheError(
        f"A cache must have a folder that it can write to. Received: {path} ({error.strerror}). "
        "Name another, or pass `group` to share one."
    )


def _refuse_others(path: Path, status: os.stat_result, access: Access, kind: int) -> None:
    if stat.S_IFMT(status.st_mode) != kind:
        raise CacheError(
            f"A cache must consist of folders and files. Received: {path}, which is something "
            "else. Remove it."
        )
    if not access.includes(status.st_uid):
        raise CacheError(
            f"A cache must be made by who uses it. Received: {path}, made by user {status.st_uid}, "
            f"for {access.users}. Look who made it, and remove it or name another folder."
        )


def _tighten(handle: int, path: Path, status: os.stat_result, access: Access, mode: int) -> bool:
    """Closes what belongs to this user to those who could only read it; returns whether it did.

    What others could write is refused and not closed: they may have written there already.
    """
    found = stat.S_IMODE(status.st_mode)
    surplus = found & ~mode
    mine = status.st_uid == os.geteuid() and access.group in (None, status.st_gid)
    if not mine or not surplus or surplus & OTHERS_WRITE:
        return False
    os.fchmod(handle, found & mode)
    log.warning(
        "datacache: closed %s to others, who could read it: mode %o, not %o",
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
            f"A cache must be open to {access.users} only. Received: {path} with mode {found:o} "
            f"and group {status.st_gid}, not mode {mode:o}. If nobody else has written there, "
            f"correct it: {mend}; otherwise remove it: python -m datacache rm --all {name}. To "
            "share with a group, pass `group`."
        )
