"""Tests setup and commands without TensorFlow, and the contents of an sdist."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

from tests.launch import ROOT


def test_setup_without_a_working_tensorflow_names_the_cause(tmp_path):
    venv.create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    (packages,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    (tmp_path / "isolated").mkdir()
    for name in ("setuptools", "_distutils_hack", "pkg_resources"):
        ours = Path(sysconfig.get_path("purelib")) / name
        (packages / name).symlink_to(ours)
        (tmp_path / "isolated" / name).symlink_to(ours)

    def built(*flags, **variables):
        command = [python, *flags, "setup.py", "build", "--build-base", tmp_path / "build"]
        environment = os.environ | variables
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )

    done = built()
    assert done.returncode != 0
    assert "tfposeidon requires TensorFlow, which is not installed" in done.stderr
    assert "python -m tfposeidon install" in done.stderr
    (packages / "tensorflow").mkdir()
    (packages / "tensorflow" / "__init__.py").write_text("raise ImportError('no libmissing.so')")
    assert "no libmissing.so" in built().stderr
    # pip's isolated build also hides the site-packages of the user.
    assert "no libmissing.so" in built("-S", PYTHONPATH=str(tmp_path / "isolated")).stderr


def test_the_sdist_contains_all_build_files(tmp_path):
    """`python -m tests.versions` installs from an sdist; this test checks only the file names."""
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


def test_commands_print_help_without_tensorflow():
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
