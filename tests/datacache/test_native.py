"""Native copies and checksums equal those of NumPy and zlib at any address."""

import subprocess
import sys
import zlib

import numpy as np
import pytest

from datacache import native
from tests.launch import ROOT


@pytest.mark.parametrize("shape", [(), (3,), (63,), (64, 65), (100, 100, 3)])
@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_records_are_gathered_at_any_address(shape, dtype):
    records = np.random.default_rng(0).integers(0, 256, (17, *shape)).astype(dtype)
    places = np.random.default_rng(1).integers(0, 17, 9)
    raw = np.full(9 * records[0].nbytes + 128, 7, np.uint8)
    for begin in (0, 1, 8, 63):
        into = np.ndarray((9, *shape), dtype, raw, begin)
        native.gather(records, places, into)
        np.testing.assert_array_equal(into, records[places])
        assert (raw[:begin] == 7).all()
        assert (raw[begin + into.nbytes :] == 7).all()
        raw[:] = 7
    native.gather(records, places[:0], into[:0])
    native.gather(records, places, None)
    with pytest.raises(IndexError, match=r"`indices` must be in 0..16. Received: 17..17"):
        native.gather(records, np.array([17]), into[:1])


@pytest.mark.parametrize("at_a_time", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 31, 33, 63, 64, 65, 127, 129, 255, 256, 300, 4099])
def test_checksums_are_those_of_zlib_at_any_address(size, at_a_time, monkeypatch):
    if at_a_time > native.checksum_lanes():
        pytest.skip("This processor supports fewer lanes.")
    monkeypatch.setattr(native, "checksum_lanes", lambda: at_a_time)
    records = np.random.default_rng(size).integers(0, 256, (17, size)).astype("uint8")
    places, before = np.array([3, 16, 0, 3]), np.array([0, 1, 2**32 - 1, 77], np.uint32)
    expected = [zlib.crc32(records[p].data, int(b)) for p, b in zip(places, before, strict=True)]
    raw = np.full(4 * size + 128, 7, np.uint8)
    for begin in (0, 1, 8, 31, 63):
        into, checksums = np.ndarray((4, size), np.uint8, raw, begin), before.copy()
        native.gather(records, places, into, checksums)
        assert checksums.tolist() == expected
        np.testing.assert_array_equal(into, records[places])
        assert (raw[:begin] == 7).all()
        assert (raw[begin + into.nbytes :] == 7).all()
        raw[:] = 7
        checksums = before.copy()
        native.gather(records, places, None, checksums)
        assert checksums.tolist() == expected


def test_checksums_of_records_equal_those_of_rfc_3720():
    """Inputs of 32 bytes are from appendix B.4; 0xE3069283 is the check value of CRC-32C."""
    for content, expected in (
        (b"", 0),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
    ):
        assert native.crc32c(content) == expected


def test_a_library_for_another_machine_is_refused(tmp_path):
    other = tmp_path / "other.so"
    other.write_bytes(b"of another processor")
    script = f"from datacache import native; native.LIBRARY = native.Path({str(other)!r}); "
    command = [sys.executable, "-c", script + "print(native.checksum_lanes())"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: The library of datacache must be built for this machine" in done.stderr
