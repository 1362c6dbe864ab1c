"""Tests the search for CUDA toolkits, NCCL and drivers, and the remedies if they are missing."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

from tests.launch import ROOT
from tfposeidon import native, ops
from tfposeidon.commands import check, cuda, install
from tfposeidon.commands.versions import InstallError

NCCL_H = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 7\n"


def toolkit_in(home, release="12.8"):
    """Creates a folder that looks like a CUDA toolkit, with an `nvcc` that prints its release."""
    (home / "bin").mkdir(parents=True)
    (home / "lib64").mkdir()
    (home / "lib64" / "libcudart_static.a").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return home


def nccl_in(home, library="lib/libnccl.so.2"):
    for path, text in (("include/nccl.h", NCCL_H), (library, "")):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    return home


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """Simulates a machine without a driver, and an environment without CUDA wheels."""
    monkeypatch.setattr(cuda, "driver_version", lambda: None)
    monkeypatch.setattr(cuda, "sys", SimpleNamespace(path=[str(tmp_path / "site-packages")]))
    monkeypatch.setattr(cuda.sysconfig, "get_path", lambda name: str(tmp_path / "purelib"))
    for name in ("HOROVOD_CUDA_HOME", "HOROVOD_NCCL_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_an_explicit_toolkit_has_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(toolkit_in(tmp_path / "named")))
    monkeypatch.setenv("PATH", str(toolkit_in(tmp_path / "other", "13.0") / "bin"))
    found = cuda.require_toolkit()
    assert (found.home, found.version) == (tmp_path / "named", (12, 8))
    assert found.static_runtime == tmp_path / "named" / "lib64" / "libcudart_static.a"


def test_the_toolkit_of_a_script_that_calls_nvcc_is_found(monkeypatch, tmp_path):
    real = toolkit_in(tmp_path / "cuda")
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\necho '#$ _HERE_={real}/bin' >&2\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    assert cuda.require_toolkit().home == real


@pytest.mark.parametrize(
    ("release", "driver", "message"),
    [
        (None, None, r"GPU code requires nvcc.*apt-get install cuda-nvcc-12-8.*pip install"),
        ("12.6", None, r"requires nvcc 12.8 or later. Received: nvcc 12.6"),
        ("13.0", (12, 4), r"CUDA 13.0 requires NVIDIA's driver 580 or later.*up to 12.4"),
    ],
)
def test_toolkits_that_cannot_compile_are_refused(monkeypatch, tmp_path, release, driver, message):
    home = toolkit_in(tmp_path / "cuda", release) if release else tmp_path / "none"
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(home))
    monkeypatch.setattr(cuda, "tensorflow_cuda", lambda: "12.5.1")
    monkeypatch.setattr(cuda, "driver_version", lambda: driver)
    with pytest.raises(InstallError, match=message):
        cuda.require_toolkit()


def test_an_unsuitable_toolkit_does_not_hide_others(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(toolkit_in(tmp_path / "old", "11.5") / "bin"))
    wheel = toolkit_in(tmp_path / "site-packages" / "nvidia" / "cu13", "13.0")
    (tmp_path / "site-packages" / "nvidia" / "nccl").mkdir()
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: "/usr/local" not in str(path) and real(path))
    assert cuda.require_toolkit().home == wheel
    (wheel / "lib64" / "libcudart_static.a").unlink()
    with pytest.raises(InstallError, match=r"Received: nvcc 11\.5"):
        cuda.require_toolkit()


def test_a_missing_runtime_is_named(monkeypatch, tmp_path):
    home = toolkit_in(tmp_path / "cuda")
    (home / "lib64" / "libcudart_static.a").unlink()
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(home))
    with pytest.raises(InstallError, match=r"requires libcudart_static.a.*cuda-cudart-dev-12-8"):
        cuda.require_toolkit()


def test_the_build_finds_versioned_libraries_of_wheels(monkeypatch, tmp_path):
    home = toolkit_in(tmp_path / "cuda", "13.0")
    (home / "lib64" / "libcudart.so.13").touch()
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(home))
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(nccl_in(tmp_path / "nccl")))
    given = install.cuda_environment(tmp_path)
    assert given["PATH"].startswith(str(home / "bin"))
    found = {path.name: path.resolve() for path in Path(given["CMAKE_LIBRARY_PATH"]).iterdir()}
    assert found == {
        "libnccl.so": tmp_path / "nccl" / "lib" / "libnccl.so.2",
        "libcudart.so": home / "lib64" / "libcudart.so.13",
        "libcudart_static.a": home / "lib64" / "libcudart_static.a",
    }


def test_a_newer_nvcc_compiles_without_a_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(toolkit_in(tmp_path, "13.0")))
    assert cuda.require_toolkit().version == (13, 0)


def test_nccl_of_a_wheel_is_found_relative_to_horovod(monkeypatch, tmp_path):
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(toolkit_in(tmp_path / "cuda")))
    toolkit = cuda.require_toolkit()
    elsewhere = nccl_in(tmp_path / "site-packages" / "nvidia" / "nccl")
    assert cuda.require_nccl(toolkit).rpath == str(elsewhere / "lib")
    monkeypatch.setattr(cuda.sysconfig, "get_path", lambda name: str(tmp_path / "site-packages"))
    found = cuda.require_nccl(toolkit)
    assert (found.version, found.rpath) == ("2.27.7", "$ORIGIN/../../nvidia/nccl/lib")
    # An explicit location takes precedence, and its path is absolute.
    named = nccl_in(tmp_path / "named", "lib/x86_64-linux-gnu/libnccl.so")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(named))
    assert cuda.require_nccl(toolkit).rpath == str(named / "lib" / "x86_64-linux-gnu")
    monkeypatch.setenv("HOROVOD_NCCL_HOME", str(tmp_path / "empty"))
    with pytest.raises(InstallError, match="pip install nvidia-nccl-cu12"):
        cuda.require_nccl(toolkit)


@pytest.mark.parametrize("place", ["site-packages", "purelib"])
def test_tensorflows_cuda_is_read_without_importing_it(tmp_path, place):
    assert cuda.tensorflow_cuda() is None
    info = tmp_path / place / "tensorflow/python/platform/build_info.py"
    info.parent.mkdir(parents=True)
    (tmp_path / place / "tensorflow/__init__.py").touch()
    info.write_text("build_info = dict([('cuda_version', '12.5.1'), ('cudnn_version', '9')])")
    assert cuda.tensorflow_cuda() == "12.5.1"


def report(monkeypatch, gpus, driver=None, tensorflow=None, horovod=None):
    monkeypatch.setattr(cuda, "driver_version", lambda: driver)
    monkeypatch.setattr(cuda, "tensorflow_cuda", lambda: tensorflow)
    monkeypatch.setattr(check, "_horovod_cuda", lambda: horovod)
    return dict(check.gpu_rows(gpus))


def test_the_report_of_a_machine_without_gpus_has_one_line(monkeypatch):
    assert report(monkeypatch, 0) == {"GPUs": "none, and no NVIDIA driver"}


def test_the_report_names_incompatible_versions(monkeypatch):
    rows = report(monkeypatch, 0, driver=(12, 8))
    assert "built for CPUs; python -m tfposeidon install --cuda" in rows["GPUs"]
    rows = report(monkeypatch, 0, driver=(12, 8), tensorflow="12.5.1", horovod="12.5.82")
    assert "pip install 'tensorflow[and-cuda]'" in rows["GPUs"]
    assert rows["CUDA"] == "TensorFlow for 12.5.1, Horovod for 12.5.82"
    rows = report(monkeypatch, 1, driver=(13, 0), tensorflow="12.5.1", horovod="13.0.88")
    assert rows["GPUs"] == "1"
    with pytest.raises(InstallError, match=r"Horovod was built for CUDA 13\.0\.88.*580"):
        report(monkeypatch, 1, driver=(12, 8), tensorflow="12.5.1", horovod="13.0.88")


def test_native_ops_for_another_gpu_are_named(monkeypatch):
    def fail(tensors):
        raise tf.errors.InternalError(None, None, "no kernel image is available")

    monkeypatch.setattr(native, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(ops, "l2_norms", fail)
    message = "architecture of this GPU. Received: no kernel image"
    with pytest.raises(InstallError, match=message):
        report(monkeypatch, 1, driver=(13, 0), tensorflow="12.5.1", horovod="13.0.88")


@pytest.mark.slow
def test_unsupported_architectures_end_the_build(tmp_path):
    home = toolkit_in(tmp_path / "cuda")
    with (home / "bin" / "nvcc").open("a") as nvcc:
        nvcc.write("echo compute_80\n")
    command = [sys.executable, "setup.py", "build_ext", "--cuda", "--gpus", "80,103"]
    command += ["--build-lib", tmp_path / "lib", "--build-temp", tmp_path / "temp"]
    environment = os.environ | {"HOROVOD_CUDA_HOME": str(home)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert "must be architectures that nvcc supports. Received: (80, 103)" in done.stderr
