"""The installer: corrections, cache, failed builds, and setup.py where something is missing."""

import pytest

from tfposeidon.commands import install


def test_corrections_must_match_exactly_once(tmp_path):
    (tmp_path / "file").write_text("wrong wrong")
    correction = install.Correction(file="file", wrong="wrong", right="right", why="")
    with pytest.raises(install.InstallError, match="Received: 2 matches in file"):
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
        ("_compiler_version", lambda: "99.0"),
        ("CORRECTIONS", ()),
        ("nvidia_driver_present", lambda: True),
    ],
)
def test_the_cache_key_follows_what_the_wheel_depends_on(monkeypatch, name, value):
    before = install.cache_key()
    assert install.cache_key() == before
    monkeypatch.setattr(install, name, value)
    assert install.cache_key() != before


def test_a_gpu_machine_takes_cuda_and_nccl(monkeypatch):
    monkeypatch.setattr(install, "nvidia_driver_present", lambda: True)
    assert install.tensorflow_requirement().startswith("tensorflow[and-cuda]==")
    assert install.horovod_flags()["HOROVOD_GPU_OPERATIONS"] == "NCCL"


def test_mpi_passes_through(monkeypatch):
    assert install.horovod_flags()["HOROVOD_WITHOUT_MPI"] == "1"
    monkeypatch.setenv("HOROVOD_WITH_MPI", "1")
    assert install.horovod_flags()["HOROVOD_WITH_MPI"] == "1"
    assert "HOROVOD_WITHOUT_MPI" not in install.horovod_flags()


def test_a_failed_build_prints_its_last_lines_and_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    install.cache_folder().mkdir(parents=True)
    source = tmp_path / "source"
    source.mkdir()
    (source / "setup.py").write_text("raise SystemExit('error: gloo.h: no such file')")
    with pytest.raises(install.InstallError) as caught:
        install._compile(source, tmp_path / "wheel", tmp_path)
    assert "error: gloo.h: no such file" in str(caught.value)
    assert "pip-setuptools-caller" not in str(caught.value)
    assert "apt-get install g++ cmake make python3-dev" in str(caught.value)


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        install.InstallError,
        match=r"Missing: cmake, make, g\+\+\. Run: apt-get install cmake make g\+\+",
    ):
        install._require_build_tools()


def test_a_gpu_machine_needs_nvcc(monkeypatch, tmp_path):
    monkeypatch.setattr(install, "nvidia_driver_present", lambda: True)
    monkeypatch.setattr(install, "_nvcc_path", lambda: str(tmp_path))
    with pytest.raises(install.InstallError, match="Missing: nvcc"):
        install._require_build_tools()


def test_horovod_needs_tensorflow_first(monkeypatch):
    monkeypatch.setattr(install, "_tensorflow_version", lambda: None)
    with pytest.raises(install.InstallError, match="Run: python -m tfposeidon install"):
        install.install_horovod()
