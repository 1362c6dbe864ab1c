"""Start-up messages of TensorFlow are hidden, and other output is not."""

import os
import signal
import subprocess
import sys

import pytest

from tests.launch import ROOT
from tfposeidon import quiet

NOISE = "I0000 00:00:1795430681.572436 26506 port.cc:153] oneDNN custom operations are on. You may"


@pytest.mark.parametrize(("level", "silent"), [(None, True), ("2", True), ("0", False)])
def test_startup_messages_are_hidden_unless_requested(level, silent):
    environment = {} if level is None else {quiet.LEVEL: level}
    assert quiet.is_startup_message(NOISE, environment) is silent
    assert not quiet.is_startup_message("E0000 cannot load", environment)


def test_other_output_during_the_import_of_tensorflow_is_forwarded(capfd, monkeypatch):
    monkeypatch.setenv(quiet.LEVEL, "1")
    monkeypatch.setattr(
        quiet.importlib,
        "import_module",
        lambda name: os.write(2, f"{NOISE}\nE0000 cannot load {name}\n".encode()),
    )
    quiet.import_tensorflow()
    assert capfd.readouterr().err == "E0000 cannot load tensorflow\n"
    assert os.environ[quiet.LEVEL] == "1", "values that the user has set must remain"


ABORTS = """
import os, sys
from unittest import mock
from tfposeidon import quiet
def load(name):
    os.write(2, b"oneDNN custom operations are on.\\nThis CPU is without AVX.\\n")
    os.abort()
with mock.patch.object(quiet.importlib, "import_module", load):
    quiet.import_tensorflow()
"""


def test_messages_of_native_code_before_an_abort_are_printed():
    done = subprocess.run(
        [sys.executable, "-c", ABORTS], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGABRT
    assert done.stderr == "This CPU is without AVX.\n"
