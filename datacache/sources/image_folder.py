"""Reads samples from files in folders, with one folder for each class."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from datacache.native import FileStatus
from datacache.sources.source import RandomSource, SourceError, contents_digest, digest, read_listed

IMAGE_EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


class FolderSource(RandomSource):
    """Files of a folder; see `from_folder`. Without labels, `class_names` is empty."""

    def __init__(
        self,
        path: Path,
        extensions: Sequence[str] | None,
        labels: bool,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.path, self._labels = path, labels
        # Sort, because file systems list files in different orders.
        found = dict(sorted(_files(path, extensions)))
        if not found:
            raise SourceError(
                f"A source must have samples. Received: {path}, with no file ending in "
                f"{', '.join(extensions) if extensions else 'any extension'}. Pass another folder, "
                "or other `extensions`."
            )
        self._names, self._listed = list(found), np.array(list(found.values()))
        classes = [name.partition(os.sep)[0] if os.sep in name else "" for name in self._names]
        if labels and "" in classes:
            raise SourceError(
                "With labels, files must be in one folder per class. Received: "
                f"{self._names[classes.index('')]!r} directly in {path}. Move the file, or pass "
                "labels=False."
            )
        # Derive labels from folders and not from files, so that a class without files in the
        # validation data has the same label there.
        self.class_names = list(class_names or ())
        if labels and not class_names:
            self.class_names = sorted(one.name for one in _entries(path) if one.is_dir())
        numbers = {name: number for number, name in enumerate(self.class_names)}
        if labels and (others := sorted(set(classes) - set(numbers))):
            raise SourceError(
                f"Each folder must be a class of `class_names`. Received: {others[0]!r} in {path}, "
                f"which is none of the {len(numbers)} names. Add it to `class_names`, or move the "
                "folder."
            )
        self._classes = np.array([numbers.get(name, 0) for name in classes], np.int64)
        self.identity = {
            "kind": "folder",
            "labels": labels,
            "files": digest([(name, *listed[:2]) for name, listed in found.items()]),
            "contents": contents_digest(len(found), self._file),
            "classes": self.class_names,
        }
        dtypes = [tf.string, tf.int64] if labels else [tf.string]
        self.signature: Sequence[Any] = [tf.TensorSpec([], dtype) for dtype in dtypes]

    def __len__(self) -> int:
        return len(self._names)

    def __str__(self) -> str:
        return f"images in {self.path}"

    @override
    def name(self, sample: int) -> str:
        return str(self.path / self._names[sample])

    @override
    def read(self, sample: int) -> list[np.ndarray]:
        name, listed = self._file(sample)
        contents = np.array(read_listed(name, 0, listed.size, listed), object)
        return [contents, self._classes[sample]] if self._labels else [contents]

    def _file(self, sample: int) -> tuple[str, FileStatus]:
        path = os.path.join(self.path, self._names[sample])
        return path, FileStatus(*self._listed[sample].tolist())

    @override
    def decode(self, *stored: Any) -> Any:
        return stored if self._labels else stored[0]


def from_folder(
    path: str | os.PathLike[str],
    extensions: Sequence[str] | None = IMAGE_EXTENSIONS,
    labels: bool = True,
    class_names: Sequence[str] | None = None,
) -> FolderSource:
    """Creates a source from the files in a folder.

    `preprocess` receives the contents of a file as a scalar string, and the label as an int64.

    Args:
      path: Folder with one folder for each class. Hidden folders and `lost+found` are ignored. The
        label is the index of the class's folder in alphabetical order, including folders without
        files; see `class_names` of the result.
      extensions: Endings of the files to include, case-insensitive; `None` for all files.
      labels: True if samples have labels. Without labels, `preprocess` receives the contents only,
        and files may be at any depth below the folder.
      class_names: Names of the folders by label. Pass `class_names` of the training data for
        validation data, so that a class has the same label in both even if folders are missing.
        `None` (default) uses the existing folders.

    Returns:
      Source of these files, in the order of their paths.

    Raises:
      SourceError: If the folder does not exist or has no matching file. With labels, also if a file
        is outside the folders of classes, or its folder is not in `class_names`.
      ValueError: If `extensions` or `class_names` is a string and not a list, or `class_names` is
        empty, has duplicates or is passed without labels.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     for name in ("cat", "dog"):
      ...         Path(folder, name).mkdir()
      ...         _ = Path(folder, name, "1.png").write_bytes(name.encode())
      ...     source = from_folder(folder)
      ...     contents, label = source.read(1)
      >>> contents.item(), source.class_names[label]
      (b'dog', 'dog')
    """
    folder = Path(path).expanduser()
    if isinstance(extensions, str):
        raise ValueError(
            f"`extensions` must be a list. Received: extensions={extensions!r}. Pass "
            f"[{extensions!r}]."
        )
    names = () if class_names is None else class_names
    is_list = not isinstance(names, str) and len(set(names)) == len(names)
    if class_names is not None and not (is_list and names and labels):
        raise ValueError(
            "`class_names` must be a non-empty list without duplicates, and requires labels=True. "
            f"Received: class_names={class_names!r}, labels={labels}. Pass the name of each "
            "class's folder once, or omit `class_names`."
        )
    if not folder.is_dir():
        raise SourceError(
            f"The folder of a source must exist. Received: {folder}, which is not a folder. Check "
            "the path and the mount."
        )
    try:
        return FolderSource(folder, extensions, labels, class_names)
    except OSError as error:
        raise SourceError(
            f"Files and folders of a source must be readable. Received: {error}. Grant this user "
            "read permission, or remove the file if it is a broken link."
        ) from error


def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    """Returns a folder's entries without hidden entries and `lost+found`, which is not data."""
    with os.scandir(path) as entries:
        return [one for one in entries if one.name[0] != "." and one.name != "lost+found"]


def _files(path: Path, extensions: Sequence[str] | None) -> list[tuple[str, FileStatus]]:
    endings = tuple(ending.lower() for ending in extensions) if extensions is not None else ("",)
    # Keep the resolved paths of each folder and its ancestors, to detect links to an ancestor.
    root = path.resolve()
    found, folders = [], [(path, {root, *root.parents})]
    while folders:
        folder, above = folders.pop()
        for entry in _entries(folder):
            if entry.is_dir():
                below = Path(entry.path)
                if (real := below.resolve()) in above:
                    raise SourceError(
                        f"A folder must not contain itself. Received: {below}, a link to {real}. "
                        "Remove the link."
                    )
                folders.append((below, above | {real}))
            # Skip pipes and devices, because reading them could block.
            elif entry.name.lower().endswith(endings) and stat.S_ISREG(entry.stat().st_mode):
                status = FileStatus.of(entry.stat())
                found.append((os.path.relpath(entry.path, path), status))
    return found
