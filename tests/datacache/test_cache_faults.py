"""Tests samples that are corrupt, unreadable or undecodable, and caches that cannot be opened."""

import pytest
import tensorflow as tf

import datacache
from datacache.errors import CacheError
from tests import drawn
from tests.datacache.caches import BATCH, SAMPLES, sample_numbers


@pytest.mark.parametrize("verify", ["first", "always"])
def test_corrupt_samples_are_repaired(images, opened, verify, caplog):
    opened(images).warm(progress=False)
    cache = opened(images, verify=verify)
    pool = cache._tiers.pool
    pool._columns[0][7, 0, 0, 0] ^= 1
    data = cache.dataset(BATCH)
    assert sorted(sample_numbers(data)) == list(range(SAMPLES))
    assert (cache.stats().healed, cache.stats().source_reads) == (1, 1)
    if verify == "always":
        pool._columns[1][3] += 1
        assert sorted(sample_numbers(data)) == list(range(SAMPLES))
        assert cache.stats().healed == 2


class Flaky:
    """Source in which the first reads of each sample fail."""

    def __init__(self, source, failures):
        self._source, self.left = source, dict.fromkeys(range(len(source)), failures)

    def __getattr__(self, name):
        return getattr(self._source, name)

    def __len__(self):
        return len(self._source)

    def read(self, sample):
        self.left[sample] -= 1
        if self.left[sample] >= 0:
            raise OSError(5, "Input/output error")
        return self._source.read(sample)


def test_reads_are_repeated_before_an_error_names_the_sample(images, opened, monkeypatch):
    monkeypatch.setattr("datacache.tiers.tier.FIRST_PAUSE_S", 0.001)
    source = datacache.from_folder(images)
    cache = opened(Flaky(source, 2))
    assert sorted(sample_numbers(cache.dataset(BATCH))) == list(range(SAMPLES))
    assert cache.stats().retries == 2 * SAMPLES
    flaky = Flaky(source, 2)
    cache = opened(flaky, memory=None)
    flaky.left[3] = 9
    with pytest.raises(
        Exception,
        match=r"A sample must be readable. Received: \[Errno 5\].* for .*00003.png, 4 times",
    ):
        sample_numbers(cache.dataset(BATCH))


def test_an_undecodable_sample_is_named(tmp_path, opened):
    folder = drawn.folder(tmp_path / "images", SAMPLES)
    (folder / "class1" / "00011.png").write_bytes(b"no image")
    with pytest.raises(
        datacache.SourceError,
        match=r"`preprocess` must accept every sample. .* for .*00011.png. Correct `pre",
    ):
        opened(folder).warm(progress=False)


def test_invalid_caches_are_refused(images, tmp_path, opened, monkeypatch):
    with pytest.raises(
        datacache.SourceError,
        match=r"source must exist. Received: .*nowhere, which is not a folder",
    ):
        datacache.from_folder(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        datacache.SourceError,
        match=r"A source must have samples. Received: .*with no file ending in",
    ):
        datacache.from_folder(tmp_path / "empty")
    with pytest.raises(
        datacache.SourceError, match=r"one folder per class. Received: '00000.png' directly"
    ):
        datacache.from_folder(images / "class0")
    assert len(datacache.from_folder(images / "class0", labels=False)) == SAMPLES // drawn.CLASSES
    with pytest.raises(
        datacache.SourceError,
        match=r"Received: list without identity, signature, name, decode, read. Use",
    ):
        datacache.Cache([1, 2])
    with pytest.raises(ValueError, match=r"`budget` must be a size.* Received: budget='lots'"):
        opened(images, budget="lots")
    with pytest.raises(
        ValueError, match=r"`verify` must be one of first, always, never. Received: verify=True"
    ):
        opened(images, verify=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CacheError,
        match=r"must be writable. Received: .*file/.* \(Not a directory\). Pass another",
    ):
        opened(images, memory=tmp_path / "file")
    monkeypatch.setattr("datacache.pool.folder.SHARED_MEMORY", "/nowhere")
    with pytest.raises(
        CacheError,
        match=r"requires /nowhere, a folder in shared memory. Received: a mach.*Mount a",
    ):
        datacache.Cache(datacache.from_folder(images))
    folder = tmp_path / "memory" / opened(images, memory=tmp_path / "other").fingerprint[:20]
    folder.mkdir(mode=0o700, parents=True)
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(CacheError, match=r"A store must have a folder of its own"):
        opened(images)
    with pytest.raises(
        ValueError, match=r"A sample must consist of dense tensors. Received: RaggedTensor"
    ):
        opened(images, lambda contents, label: tf.strings.bytes_split([contents]))
