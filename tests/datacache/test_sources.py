"""Tests image folders and custom sources: samples, fingerprints, and refused sources."""

import os

import numpy as np
import pytest
import tensorflow as tf

import datacache
from datacache import SourceError
from datacache.sources.source import RandomSource

tfds = pytest.importorskip("tensorflow_datasets")


def _written(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def _names(source):
    return [os.path.relpath(source.name(number), source.path) for number in range(len(source))]


def test_folders_and_files_may_have_any_names(tmp_path):
    names = [
        "Kätzchen/näher dran/1 of 2.JPG",
        "Kätzchen/a.png",
        "cats and dogs/b.Jpeg",
        "犬/三.webp",
    ]
    hidden = [
        "cats and dogs/.b.png",
        ".thumbs/a.png",
        "犬/.git/a.png",
        "notes.txt",
        "犬/readme",
        "犬/a.jpg.part",
    ]
    root = _written(tmp_path / "my images", *names, *hidden)
    source = datacache.from_folder(root)
    assert _names(source) == sorted(names)
    assert source.class_names == ["Kätzchen", "cats and dogs", "犬"]
    for number, name in enumerate(sorted(names)):
        contents, label = source.read(number)
        assert contents.item() == name.encode()
        assert source.class_names[label] == name.partition("/")[0]
    cache = datacache.Cache(source, memory=tmp_path / "memory", variable_shapes=True)
    read = [
        pair
        for batch in cache.dataset(3, shuffle=False)
        for pair in zip(*map(np.asarray, batch), strict=True)
    ]
    assert [(bytes(text).decode(), label) for text, label in read] == list(
        zip(sorted(names), [0, 0, 1, 2], strict=True)
    )
    cache.close()


def _packed(root, first, count=3, size=200_000):
    """Writes files with equal names, sizes and times, as an archive would contain them."""
    for number in range(count):
        path = root / "a" / f"{number}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size // 2) + bytes([first + number]) * (size - size // 2))
        os.utime(path, ns=(10**18, 10**18))
    return root


def _record_file(root, first):
    path = root / "a.tfrecord"
    root.mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(first, first + 5):
            writer.write(bytes([number]) * 99)
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda root, first: datacache.from_folder(_packed(root, first)),
        lambda root, first: datacache.from_folder(_packed(root, first, count=200, size=8)),
        # A fingerprint reads only some blocks of a large file. The files of the two folders are
        # equal in their first half.
        lambda root, first: datacache.from_folder(_packed(root, first, count=1, size=2**23)),
        lambda root, first: datacache.from_tfrecords(_record_file(root, first)),
    ],
)
def test_sources_are_distinguished_by_their_contents(tmp_path, make):
    train, val = make(tmp_path / "train", 0), make(tmp_path / "val", 9)
    assert make(tmp_path / "moved", 0).identity == train.identity != val.identity
    caches = [
        datacache.Cache(source, lambda content, *_: content, memory=tmp_path / "memory")
        for source in (train, val)
    ]
    for cache, source in zip(caches, (train, val), strict=True):
        (read,) = cache.dataset(len(source), shuffle=False)
        assert read.numpy().tolist() == [source.read(i)[0].item() for i in range(len(source))]
        cache.close()


def test_files_changed_since_listing_are_refused(tmp_path):
    root = _written(tmp_path / "images", *(f"a/{number}.png" for number in range(1, 7)))
    # A copy with the same size and time has another inode.
    for folder in (root, tmp_path / "new"):
        _written(folder, "a/5.png")
        os.utime(folder / "a/5.png", ns=(10**18, 10**18))
    source = datacache.from_folder(root)
    (root / "a/1.png").write_bytes(b"longer than it was")
    (root / "a/2.png").write_bytes(b"")
    (root / "a/3.png").unlink()
    (tmp_path / "new/a/5.png").rename(root / "a/5.png")
    os.utime(root / "a/6.png", ns=(0, 0))
    (root / "a/4.png").rename(root / "moved")
    (root / "moved").rename(root / "a/4.png")
    changed = r"/a/%d.png, changed or replaced since it was listed .*Open the cache again"
    for number in (1, 2, 5, 6):
        with pytest.raises(SourceError, match=changed % number):
            source.read(number - 1)
    with pytest.raises(OSError, match="No such file"):
        source.read(2)
    assert source.read(3)[0].item() == b"a/4.png", "a file that moved and returned is unchanged"


def test_folders_may_have_no_labels(tmp_path):
    root = _written(tmp_path / "images", "b.png", "a/c.png", "a/d/e.PNG", "a/f.txt")
    source = datacache.from_folder(root, labels=False)
    assert _names(source) == ["a/c.png", "a/d/e.PNG", "b.png"]
    assert [source.read(number)[0].item() for number in range(3)] == [
        b"a/c.png",
        b"a/d/e.PNG",
        b"b.png",
    ]
    assert source.class_names == []
    assert len(datacache.from_folder(root, None, labels=False)) == 4
    assert _names(datacache.from_folder(root, [".TXT"])) == ["a/f.txt"]
    identities = [
        datacache.from_folder(root / "a", extensions, labels=False).identity
        for extensions in ([".png"], None)
    ]
    assert identities[0] != identities[1]


def test_a_class_without_files_keeps_its_number(tmp_path):
    training = datacache.from_folder(_written(tmp_path / "training", "ant/1.png", "cat/1.png"))
    root = _written(tmp_path / "validation", "cat/1.png")
    (root / "ant").mkdir()
    (root / ".hidden").mkdir()
    assert datacache.from_folder(root).class_names == training.class_names == ["ant", "cat"]
    assert datacache.from_folder(root).read(0)[1] == training.read(1)[1] == 1
    (root / "ant").rmdir()
    assert datacache.from_folder(root).read(0)[1] == 0
    named = datacache.from_folder(root, class_names=training.class_names)
    assert (named.read(0)[1], named.class_names) == (1, training.class_names)
    assert named.identity != datacache.from_folder(root).identity
    with pytest.raises(SourceError, match=r"must be a class of `class_names`. Received: 'cat'"):
        datacache.from_folder(root, class_names=["ant"])
    for wrong in ("cat", ["cat", "cat"], []):
        with pytest.raises(ValueError, match="`class_names` must be a non-empty list without dup"):
            datacache.from_folder(root, class_names=wrong)


def test_ambiguous_folders_are_refused(tmp_path):
    root = _written(tmp_path / "images", "a/b.png")
    with pytest.raises(
        ValueError,
        match=r"`extensions` must be a list. Received: extensions='.png'. Pass \['.png'\]",
    ):
        datacache.from_folder(root, ".png")
    (tmp_path / "linked").symlink_to(root)
    assert _names(datacache.from_folder(tmp_path / "linked")) == ["a/b.png"]
    (root / "c").symlink_to(root / "a")
    assert datacache.from_folder(root).class_names == ["a", "c"]
    (root / "a" / "up").symlink_to(root)
    with pytest.raises(
        SourceError, match=r"must not contain itself. Received: .*a/up, a link to .*images. Remove"
    ):
        datacache.from_folder(root)
    (root / "a" / "up").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "back").symlink_to(root)
    (root / "a" / "there").symlink_to(tmp_path / "other")
    with pytest.raises(
        SourceError, match=r"contain itself. Received: .*there/back, a link to .*images"
    ):
        datacache.from_folder(root)
    (root / "a" / "there").unlink()
    (root / "itself").symlink_to(root / "itself")
    with pytest.raises(SourceError, match=r"must be readable. Received: .*symbolic links.*itself'"):
        datacache.from_folder(root)
    (root / "itself").unlink()
    (root / "a" / "gone.png").symlink_to(root / "nothing")
    with pytest.raises(
        SourceError,
        match=r"must be readable. Received: .*gone.png'.* remove the file if it is a broken link",
    ):
        datacache.from_folder(root)


def test_system_folders_are_skipped_and_unreadable_folders_are_refused(tmp_path, monkeypatch):
    root = _written(
        tmp_path / "images", "dog/1.png", "lost+found/2.png", ".hidden/3.png", "ox/4.png"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    source = datacache.from_folder("~/images")
    assert source.class_names == ["dog", "ox"]
    assert _names(source) == ["dog/1.png", "ox/4.png"]
    with datacache.Cache(source, memory="~/memory") as cache:
        assert len(cache) == 2
    assert (tmp_path / "memory").is_dir()
    scandir = os.scandir

    def refused(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(
        SourceError, match=r"must be readable. Received: .*denied.*dog'. Grant this"
    ):
        datacache.from_folder(root)


class Squares:
    """Custom source without a base class."""

    def __init__(self, count, power=2):
        self._count, self._power, self.reads = count, power, []
        self.identity = {"kind": "powers", "count": count, "power": power}
        self.signature = [tf.TensorSpec([], tf.int64), tf.TensorSpec([2], tf.float32)]

    def __len__(self):
        return self._count

    def name(self, sample):
        return f"power {sample}"

    def read(self, sample):
        self.reads.append(sample)
        return [np.int64(sample**self._power), np.array([sample, 0.5], np.float32)]

    def decode(self, number, pair):
        return {"number": number, "pair": pair * 2}


@pytest.mark.parametrize("disk", [False, True])
def test_custom_sources_are_cached(tmp_path, disk):
    places = {"memory": tmp_path / "memory"} | ({"disk": tmp_path / "disk"} if disk else {})
    source = Squares(20)
    assert isinstance(source, RandomSource)
    cache = datacache.Cache(source, lambda of: of | {"half": of["pair"][0] / 4}, **places)
    for _ in range(2):
        found = {}
        for batch in cache.dataset(6):
            found |= dict(
                zip(batch["number"].numpy().tolist(), batch["half"].numpy().tolist(), strict=True)
            )
        assert found == {number**2: number / 2 for number in range(20)}
    assert sorted(source.reads) == list(range(20))
    other = datacache.Cache(Squares(20, power=3), **places)
    assert other.fingerprint != cache.fingerprint
    assert other.random_access()[3]["number"] == 27
    for one in (cache, other):
        one.close()
    with pytest.raises(SourceError, match=r"A source must have samples. Received: .*0 samples"):
        datacache.Cache(Squares(0), **places)
