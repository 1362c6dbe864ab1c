"""Files in folders, one folder for each class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from datacache.native import read_file
from datacache.sources.source import SourceError, digest

IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")


class FolderSource:
    """See `from_folder`."""

    def __init__(self, path: Path, extensions: Sequence[str] | None, labels: bool) -> None:
        self.path, self._labels = path, labels
        found = sorted(_files(path, extensions))
        if not found:
            raise SourceError(
                f"A source must have samples. Received: {path}, with no file ending in "
                f"{', '.join(extensions) if extensions else 'anything'}. Name another folder, or pass `extensions`."
            )
        self._names, self._sizes = [name for name, _, _ in found], [size for _, size, _ in found]
        classes = [name.partition(os.sep)[0] if os.sep in name else "" for name in self._names]
        if labels and "" in classes:
            raise SourceError(
                f"With labels, files must lie in one folder per class. Received: {self._names[classes.index('')]!r} "
                f"directly in {path}. Move it, or pass labels=False."
            )
        self.class_names = sorted(set(classes)) if labels else []
        numbers = {name: number for number, name in enumerate(self.class_names)}
        self._classes = np.array([numbers.get(name, 0) for name in classes], np.int64)
        self.identity = {"kind": "folder", "labels": labels, "files": digest(found)}
        self.signature: Sequence[Any] = [
            tf.TensorSpec([], tf.string),
            *([tf.TensorSpec([], tf.int64)] if labels else []),
        ]

    def __len__(self) -> int:
        return len(self._names)

    def __str__(self) -> str:
        return f"images in {self.path}"

    def name(self, sample: int) -> str:
        return str(self.path / self._names[sample])

    def read(self, sample: int) -> list[np.ndarray]:
        name, size = os.path.join(self.path, self._names[sample]), self._sizes[sample]
        # One byte more: what has grown since it was listed is another source.
        content = read_file(name, 0, size + 1)
        if len(content) != size:
            raise OSError(f"{name} has changed: it had {size} bytes when it was listed")
        contents = np.array(content, object)
        return [contents, self._classes[sample]] if self._labels else [contents]

    def decode(self, *stored: Any) -> Any:
        return stored if self._labels else stored[0]


def from_folder(
    path: str | os.PathLike[str], extensions: Sequence[str] | None = IMAGES, labels: bool = True
) -> FolderSource:
    """Files in a folder: `preprocess` receives the contents, a scalar string, and the label, a scalar int64.

    Args:
      path: With a folder for each class; the label is the class's number in alphabetical order, see `class_names`.
      extensions: Endings of the files to take, whatever their case; all files if `None`.
      labels: Without labels `preprocess` receives the contents only, and files may lie anywhere below.

    Raises:
      SourceError: If there is no such folder, or no file in it, or files outside the folders of classes.
      ValueError: If `extensions` is a text: each of its letters would be an ending.
    """
    folder = Path(path)
    if isinstance(extensions, str):
        raise ValueError(
            f"`extensions` must be several. Received: extensions={extensions!r}. Say [{extensions!r}]."
        )
    if not folder.is_dir():
        raise SourceError(
            f"A source must exist. Received: {folder}, which is no folder. Check the path and the mount."
        )
    return FolderSource(folder, extensions, labels)


def _below(folder: Path) -> Path:
    """The folder, unless a link leads back up: it would never end."""
    if folder.is_symlink() and folder.resolve() in folder.parent.resolve().joinpath("x").parents:
        raise SourceError(
            f"A folder must not be in itself. Received: {folder}, a link to {folder.resolve()}. Remove it."
        )
    return folder


def _files(path: Path, extensions: Sequence[str] | None) -> list[tuple[str, int, int]]:
    """Name, bytes and time of change of each."""
    endings = tuple(ending.lower() for ending in extensions) if extensions is not None else ("",)
    found, folders = [], [path]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(_below(Path(entry.path)))
                elif entry.name.lower().endswith(endings):
                    about = _state(entry)
                    found.append(
                        (os.path.relpath(entry.path, path), about.st_size, about.st_mtime_ns)
                    )
    return found


def _state(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except OSError as error:
        raise SourceError(
            f"A file must be there. Received: {error}. Remove it if it is a link."
        ) from error
