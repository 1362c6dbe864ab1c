"""Examples, as a user would start them."""

import re
import sys
import tempfile

import pytest

from tests.launch import ROOT, ahead, horovodrun, lab

SCRIPT = ROOT / "examples" / "image_folder.py"


def image_folder(start):
    """Runs the example on what it writes into a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        digits = ("--folder", f"{folder}/digits")
        if start == "lab":
            options = "--nodes 2 --per-node 2 --inter 200mbit"
            return lab(options, sys.executable, SCRIPT, "--partition", "split", *digits)
        return horovodrun(2, SCRIPT, "--tfds", "--epochs", "6", "--memory", f"{folder}/memory", *digits)


@ahead(image_folder)
@pytest.mark.parametrize("start", ["lab", "horovodrun"])
def test_image_folder(start, outcome):
    """A cold run reads each file once in the cluster, and a warm one none."""
    done = outcome
    assert done.returncode == 0, done.stdout[-4000:]
    read = [float(megabytes) for megabytes in re.findall(r"(?:cold|warm): .* s, ([\d.]+) MB read", done.stdout)]
    assert len(read) == 2, done.stdout[-4000:]
    assert read[0] > 0.1
    assert read[1] == 0
