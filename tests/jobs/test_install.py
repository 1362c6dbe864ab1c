"""Setup and commands where TensorFlow is missing, and what an sdist holds."""

import subprocess
import sys
import tarfile
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
    assert "tfposeidon requires TensorFlow, which is not installed" in done.stderr
    assert "python -m tfposeidon install" in done.stderr


def test_an_sdist_holds_what_the_build_needs(tmp_path):
    """`python -m tests.versions` installs from one; here only its files are looked at."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path]
    command += ["sdist", "--formats", "gztar", "--dist-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        str(file.relative_to(ROOT))
        for package in ("datacache", "keras_callbacks", "tfposeidon")
        for file in (ROOT / package).rglob("*")
        if file.suffix in {".py", ".c", ".cc", ".cu", ".h", ".inc"}
    }
    assert wanted | {"LICENSE", "build_backend.py", "pyproject.toml", "setup.py"} <= held
    assert not any(name.startswith("tests") or name.endswith(".so") for name in held)


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
