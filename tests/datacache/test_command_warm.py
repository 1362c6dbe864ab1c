"""`python -m datacache warm` fills pools."""

import pytest

import datacache
from datacache.__main__ import main
from datacache.pool.pool import Pool
from tests import drawn
from tests.datacache.test_command import SAMPLES


@pytest.fixture
def images(tmp_path):
    return drawn.folder(tmp_path / "images", SAMPLES)


def test_warm_disks(images, tmp_path, capsys):
    disk = tmp_path / "disk"
    assert main(["warm", str(images), "--disk", str(disk)]) == 0
    (folder,) = disk.iterdir()
    size = sum(path.stat().st_size + 8 for path in images.rglob("*.png"))
    assert capsys.readouterr() == (
        f"{folder}: {SAMPLES} files read ({size / 1e3:.2f} kB), {SAMPLES} ready\n",
        "",
    )
    cache = datacache.Cache(
        datacache.from_folder(images), drawn.decode, memory=tmp_path / "memory", disk=disk
    )
    assert sorted(drawn.numbers(cache.dataset(5), SAMPLES)) == list(range(SAMPLES))
    assert (cache.stats().source_reads, cache.stats().disk_hits) == (0, SAMPLES)
    cache.close()
    pool = Pool(folder)
    pool._words.array[[2, 5]] = 0
    pool.close()
    assert main(["warm", str(images), "--disk", str(disk)]) == 0
    assert f": 2 files read ({size / SAMPLES * 2 / 1e3:.0f}"[:14] in capsys.readouterr().out


def test_warm_takes_what_the_source_takes(images, tmp_path, capsys):
    (images / "class0" / "00000.png").rename(images / "class0" / "00000.dat")
    for options, samples in (
        (["--extensions", ".DAT"], 1),
        (["--extensions"], SAMPLES),
        (["--no-labels"], SAMPLES - 1),
        ([], SAMPLES - 1),
    ):
        assert main(["warm", str(images), "--disk", str(tmp_path / "disk"), *options]) == 0
        assert f" {samples} files read" in capsys.readouterr().out
    assert len(list((tmp_path / "disk").iterdir())) == 4


def test_warm_without_success(images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("datacache.tiers.tier.FIRST_PAUSE_S", 0.001)
    disk = ["--disk", str(tmp_path / "disk")]
    assert main(["warm", str(tmp_path / "nowhere"), *disk]) == 2
    assert "datacache: The folder of a source must exist. Received: " in capsys.readouterr().err
    monkeypatch.setattr("datacache.tiers.opening.DISK_BUDGET", "1800B")
    assert main(["warm", str(images), *disk]) == 1
    out, err = capsys.readouterr()
    assert err.endswith(
        " files do not fit on the disk. Free space and remove the store, or pass another disk.\n"
    )
    assert 0 < int(out.split()[-2]) < SAMPLES
    monkeypatch.setattr("datacache.tiers.opening.DISK_BUDGET", "9B")
    assert main(["warm", str(images), "--disk", str(tmp_path / "other")]) == 2
    assert (
        "A store needs space for at least one sample. Received: 9 bytes" in capsys.readouterr().err
    )
    monkeypatch.undo()
    monkeypatch.setattr("datacache.tiers.tier.FIRST_PAUSE_S", 0.001)
    source = datacache.from_folder(images)
    monkeypatch.setattr("datacache.sources.image_folder.from_folder", lambda *_, **__: source)
    (images / "class0" / "00003.png").unlink()
    assert main(["warm", str(images), "--disk", str(tmp_path / "third")]) == 2
    assert "A sample must be readable. Received: " in (err := capsys.readouterr().err)
    assert "00003.png, 4 times" in err
