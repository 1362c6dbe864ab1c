"""Examples, as a user would start them."""

import re
import sys
import tempfile

import pytest

from tests.launch import ROOT, ahead, horovodrun, lab

EXAMPLES = ROOT / "examples"
SCRIPT = EXAMPLES / "image_folder.py"


def image_folder(start):
    """Runs the example on what it writes into a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        digits = ("--folder", f"{folder}/digits")
        if start == "lab":
            options = "--nodes 2 --per-node 2 --inter 200mbit"
            return lab(options, sys.executable, SCRIPT, "--partition", "split", *digits)
        return horovodrun(
            2, SCRIPT, "--tfds", "--epochs", "6", "--memory", f"{folder}/memory", *digits
        )


@ahead(image_folder)
@pytest.mark.parametrize("start", ["lab", "horovodrun"])
def test_image_folder(start, outcome):
    """A cold run reads each file once in the cluster, and a warm one none."""
    done = outcome
    assert done.returncode == 0, done.stdout[-4000:]
    read = [
        float(megabytes)
        for megabytes in re.findall(r"(?:cold|warm): .* s, ([\d.]+) MB read", done.stdout)
    ]
    assert len(read) == 2, done.stdout[-4000:]
    assert read[0] > 0.1
    assert read[1] == 0


@ahead(lambda: horovodrun(2, EXAMPLES / "keras_digits.py"))
def test_keras_digits(outcome):
    """As `make demo` starts it; it fails below an accuracy of 97 %."""
    assert outcome.returncode == 0, outcome.stdout[-4000:]


def test_no_example_is_forgotten():
    assert {file.name for file in EXAMPLES.glob("*.py")} == {"image_folder.py", "keras_digits.py"}
