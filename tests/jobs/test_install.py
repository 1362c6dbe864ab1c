"""Setup and commands where TensorFlow is missing."""

import subprocess
import sys
import venv

from tests.launch import ROOT


def test_setup_without_tensorflow_says_which_command_to_run(tmp_path):
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "setuptools<80"], capture_output=True, timeout=300
    )
    command = [python, "setup.py", "build", "--build-base", tmp_path / "build"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "tfposeidon needs tensorflow, which is missing" in done.stderr
    assert "python -m tfposeidon install" in done.stderr


def test_commands_have_help_and_need_no_tensorflow():
    script = (
        "import sys; "
        "sys.modules['tensorflow'] = sys.modules['keras'] = sys.modules['horovod'] = None; "
        "import runpy; sys.argv = ['tfposeidon', 'install', '--help']; "
        "runpy.run_module('tfposeidon', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "--horovod-only" in done.stdout
