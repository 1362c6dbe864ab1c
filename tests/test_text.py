"""Tests the progress bar."""

import io
import sys
from types import SimpleNamespace

import pytest

from tfposeidon import text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (
            Terminal(),
            f"\r{'█' * 15}{'░' * 15}  50%  2 of 4 files, 60 s left\x1b[K"
            f"\r{'█' * 30} 100%  4 of 4 files, 0 s left\x1b[K\r\x1b[K",
        ),
        (
            io.StringIO(),
            f"{'█' * 15}{'░' * 15}  50%  2 of 4 files, 60 s left\n"
            f"{'█' * 30} 100%  4 of 4 files, 0 s left\n",
        ),
    ],
)
def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_log(stream, expected, monkeypatch):
    now_s = iter([0.0, 0.1, 60.0, 120.0])
    monkeypatch.setattr(text, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    monkeypatch.setattr(sys, "stderr", stream)
    progress = text.ProgressBar(4, "files")
    for count in (1, 1, 2):
        progress.add(count)
    progress.close()
    assert stream.getvalue() == expected
