"""Tests the installer: versions, patches of Horovod, its cache, and failed builds."""

import argparse
import sys
import tomllib
from pathlib import Path

import pytest
import tensorflow as tf

from tests.launch import ROOT
from tfposeidon import native
from tfposeidon.commands import cuda, install, versions
from tfposeidon.commands.corrections import Correction
from tfposeidon.commands.versions import InstallError


@pytest.mark.parametrize("python", versions.PYTHON)
def test_supported_versions_are_accepted(monkeypatch, python):
    monkeypatch.setattr(versions, "running_python", lambda: python)
    versions.require_python()
    for release in versions.tensorflow_releases():
        versions.require_tensorflow("tensorflow-cpu", f"{release}.0")


@pytest.mark.parametrize("python", ["3.10", "3.14"])
def test_another_python_is_refused(monkeypatch, python):
    monkeypatch.setattr(versions, "running_python", lambda: python)
    with pytest.raises(
        InstallError,
        match=r"requires Python 3\.11, 3\.12 or 3\.13\. Received: .* python3\.13 -m venv",
    ):
        versions.require_python()


@pytest.mark.parametrize("release", ["2.18", "2.22", "1.15"])
def test_another_tensorflow_is_refused(monkeypatch, capsys, release):
    monkeypatch.setattr(versions, "running_python", lambda: "3.12")
    monkeypatch.setattr(install, "_tensorflow_version", lambda: f"tensorflow-cpu {release}.1")
    assert install.main(argparse.Namespace(horovod_only=True, cuda=False)) == 1
    assert (
        f"tfposeidon requires TensorFlow 2.19, 2.20 or 2.21. Received: tensorflow-cpu {release}.1. "
        "Run: pip install 'tensorflow-cpu==2.21.*', "
        "then python -m tfposeidon install --horovod-only"
    ) in capsys.readouterr().err


def test_a_tensorflow_without_wheels_for_the_python_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "running_python", lambda: "3.13")
    with pytest.raises(
        InstallError,
        match=r"TensorFlow 2\.20 or 2\.21 on Python 3\.13\. Received: tensorflow 2\.19",
    ):
        versions.require_tensorflow("tensorflow", "2.19")


def test_an_installed_tensorflow_is_not_replaced(monkeypatch):
    monkeypatch.setattr(install, "_tensorflow_version", lambda: "tensorflow-cpu 2.21.0")
    install.install_tensorflow(False, "2.21")
    with pytest.raises(InstallError, match=r"pip install 'tensorflow-cpu==2\.20\.\*'"):
        install.install_tensorflow(False, "2.20")


def test_the_tensorflow_that_the_native_library_requires_is_installed(monkeypatch, tmp_path):
    """Without a native library, the newest supported TensorFlow is installed."""
    monkeypatch.setattr(versions, "running_python", lambda: "3.12")
    monkeypatch.setattr(install, "built_for", lambda: "2.20.0")
    assert install.tensorflow_requirement(False) == "tensorflow-cpu==2.20.*"
    assert install.tensorflow_requirement(False, "2.19") == "tensorflow-cpu==2.19.*"
    monkeypatch.setattr(install, "built_for", lambda: None)
    assert install.tensorflow_requirement(False) == "tensorflow-cpu==2.21.*"


def test_the_native_library_names_its_tensorflow(tmp_path):
    assert install.built_for(native.LIBRARY) == tf.__version__
    assert install.built_for(tmp_path / "missing.so") is None


def test_the_package_declares_the_supported_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    last = int(versions.PYTHON[-1].split(".")[1])
    assert project["requires-python"] == f">={versions.PYTHON[0]},<3.{last + 1}"
    assert any(
        requirement.startswith(f"keras>={versions.KERAS},")
        for requirement in project["dependencies"]
    )
    assert versions.running_python() == f"{sys.version_info[0]}.{sys.version_info[1]}"


def test_corrections_must_match_exactly_once(tmp_path):
    (tmp_path / "file").write_text("wrong wrong")
    correction = Correction(file="file", wrong="wrong", right="right")
    with pytest.raises(InstallError, match="Received: 2 matches in file"):
        correction.apply(tmp_path)
    (tmp_path / "file").write_text("all wrong")
    correction.apply(tmp_path)
    assert (tmp_path / "file").read_text() == "all right"


def test_the_cache_is_per_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert install.cache_folder() == tmp_path / "tfposeidon" / "wheels"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_tensorflow_version", lambda: "tensorflow 9.9"),
        ("_printed_by", lambda *command: "99.0"),
        ("CORRECTIONS", ()),
    ],
)
def test_the_cache_key_covers_the_inputs_of_the_wheel(monkeypatch, name, value):
    before = install.cache_key(False)
    assert install.cache_key(False) == before
    monkeypatch.setattr(install, name, value)
    assert install.cache_key(False) != before


@pytest.fixture
def gpu_parts(monkeypatch):
    """Simulates an installed CUDA toolkit and NCCL."""
    toolkit = cuda.Toolkit(home=Path("/cuda"), version=(12, 5))
    nccl = cuda.Nccl(include=Path("/nccl"), library=Path("/nccl/libnccl.so"), version="2.27.7")
    monkeypatch.setattr(cuda, "require_toolkit", lambda: toolkit)
    monkeypatch.setattr(cuda, "require_nccl", lambda toolkit: nccl)
    return toolkit, nccl


def test_gpu_builds_use_cuda_and_nccl(monkeypatch, gpu_parts):
    assert install.tensorflow_requirement(True).startswith("tensorflow[and-cuda]==")
    assert install.horovod_flags(True)["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    before = install.cache_key(True)
    assert before != install.cache_key(False)
    newer = cuda.Toolkit(home=Path("/cuda"), version=(13, 0))
    monkeypatch.setattr(cuda, "require_toolkit", lambda: newer)
    assert install.cache_key(True) != before


@pytest.mark.parametrize(
    ("driver", "tensorflow", "cuda_of_it", "for_gpus"),
    [
        (None, None, None, False),
        ((13, 0), None, None, True),
        ((13, 0), "tensorflow 2.21.0", "12.5.1", True),
        ((13, 0), "tensorflow-cpu 2.21.0", None, False),
    ],
)
def test_a_driver_and_tensorflow_determine_the_default_of_cuda(
    monkeypatch, driver, tensorflow, cuda_of_it, for_gpus
):
    monkeypatch.setattr(cuda, "driver_version", lambda: driver)
    monkeypatch.setattr(install, "_tensorflow_version", lambda: tensorflow)
    monkeypatch.setattr(cuda, "tensorflow_cuda", lambda: cuda_of_it)
    assert install.for_gpus() == for_gpus


def test_nccl_requires_a_tensorflow_for_gpus(monkeypatch, capsys, gpu_parts):
    monkeypatch.setattr(install, "_tensorflow_version", lambda: "tensorflow-cpu 2.21.0")
    monkeypatch.setattr(cuda, "tensorflow_cuda", lambda: None)
    assert install.main(argparse.Namespace(horovod_only=True, cuda=True)) == 1
    assert "pip install 'tensorflow[and-cuda]==2.21.*'" in capsys.readouterr().err


def test_missing_nvcc_is_named_before_anything_is_downloaded(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(install, "_pip", lambda *arguments: pytest.fail(f"pip {arguments}"))
    assert install.main(argparse.Namespace(horovod_only=False, tensorflow=None, cuda=True)) == 1
    assert f"GPU code requires nvcc, which was not found in {tmp_path}" in capsys.readouterr().err


def test_mpi_options_are_passed_to_the_build(monkeypatch):
    assert install.horovod_flags(False)["HOROVOD_WITHOUT_MPI"] == "1"
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
    assert install.horovod_flags(False)["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in install.horovod_flags(False)


def test_a_failed_build_prints_its_last_lines_and_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    install.cache_folder().mkdir(parents=True)
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text("raise SystemExit('error: gloo.h: no such file')")
    with pytest.raises(InstallError) as caught:
        install.compile_horovod(source, tmp_path, False)
    assert "error: gloo.h: no such file" in str(caught.value)
    assert "pip-setuptools-caller" not in str(caught.value)
    assert "apt-get install g++ cmake make python3-dev" in str(caught.value)


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        InstallError,
        match=r"Missing: cmake, make, g\+\+\. Run: apt-get install cmake make g\+\+",
    ):
        install.require_build_tools()


def test_horovod_requires_an_installed_tensorflow(monkeypatch):
    monkeypatch.setattr(install, "_tensorflow_version", lambda: None)
    with pytest.raises(InstallError, match="Run: python -m tfposeidon install"):
        install.install_horovod(False)
