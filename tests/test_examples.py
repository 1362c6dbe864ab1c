"""Examples, as a user would start them."""

import re
import sys

import pytest

from tests.launch import ROOT, horovodrun, lab


@pytest.mark.timeout(400)
@pytest.mark.parametrize("start", ["lab", "horovodrun"])
def test_image_folder(start, tmp_path):
    """A cold run reads each file once in the cluster, and a warm one none."""
    script = ROOT / "examples" / "image_folder.py"
    folder = ("--folder", tmp_path / "digits")
    if start == "lab":
        options = "--nodes 2 --per-node 2 --inter 200mbit"
        done = lab(options, sys.executable, script, "--partition", "split", *folder, timeout_s=300)
    else:
        done = horovodrun(2, script, "--tfds", "--epochs", "6", "--memory", tmp_path / "memory", *folder, timeout_s=300)
    assert done.returncode == 0, done.stdout[-4000:]
    read = [float(megabytes) for megabytes in re.findall(r"(?:cold|warm): .* s, ([\d.]+) MB read", done.stdout)]
    assert len(read) == 2, done.stdout[-4000:]
    assert read[0] > 0.1
    assert read[1] == 0
