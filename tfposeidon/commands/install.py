"""Installs what tfposeidon stands on: TensorFlow, and Horovod with some corrections.

Horovod 0.28.1, its last release, neither compiles against TensorFlow 2.16 or later nor connects
several hosts over Gloo as it stands. `python -m tfposeidon install` downloads its source, corrects
it (see `corrections`), builds a wheel and keeps that in a per-user cache, so that the next
environment on this machine takes seconds. `versions` says which Python and TensorFlow it takes.

This module uses the standard library only: it runs before anything else is there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

from tfposeidon.commands import versions
from tfposeidon.commands.corrections import CORRECTIONS, HOROVOD_VERSION, CorrectionError

KERAS_VERSION = f"{versions.KERAS}.*"
BUILD_TOOLS = ("setuptools>=77,<80", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
TAIL_LINES = 25
LIBRARY = Path(__file__).parents[1] / "native" / "_ops.so"


class InstallError(RuntimeError):
    """An installation that failed, with the cause and the remedy."""


def nvidia_driver_present() -> bool:
    """Returns whether a kernel driver for NVIDIA GPUs is loaded."""
    return Path("/proc/driver/nvidia/version").exists()


def tensorflow_requirement(release: str | None = None) -> str:
    """Returns what pip is asked for: the CPU wheel (half the size) unless there is a GPU to use.

    Args:
      release: Release of TensorFlow, such as `"2.20"`; by default the one that the native library
        was built for, else the newest that is supported on this Python.
    """
    release = release or versions.release_of(built_for() or versions.tensorflow_releases()[-1])
    if nvidia_driver_present():
        return f"tensorflow[and-cuda]=={release}.*"
    return f"tensorflow-cpu=={release}.*"


def built_for(library: Path = LIBRARY) -> str | None:
    """Returns the version of TensorFlow that the native library was compiled for, if it is known.

    Args:
      library: Path of the native library, which is read and not loaded.
    """
    if not library.exists():
        return None
    match = re.search(rb"tfposeidon built for TensorFlow ([0-9a-z.]+)", library.read_bytes())
    return match[1].decode() if match else None


def finds(module: str) -> bool:
    """Returns whether a module can be imported in the build, or where pip installs to.

    Args:
      module: Name of a module, without dots; it is not imported.
    """
    return _finds(module, [*sys.path, sysconfig.get_path("purelib")])


def target_has(module: str) -> bool:
    """Returns whether a module is where pip installs to, also from its isolated builds.

    Args:
      module: Name of a module, without dots; it is not imported.
    """
    # Isolated builds run this environment's interpreter, but with another `sys.path`.
    return _finds(module, [sysconfig.get_path("purelib")])


def _finds(module: str, path: list[str]) -> bool:
    return importlib.machinery.PathFinder.find_spec(module, path) is not None


def cache_folder() -> Path:
    """Returns the per-user folder of built wheels: `$XDG_CACHE_HOME/tfposeidon/wheels`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tfposeidon" / "wheels"


def horovod_flags() -> dict[str, str]:
    """Returns Horovod's build options: Gloo always, MPI and NCCL where asked for or present."""
    with_mpi = os.environ.get("HOROVOD_WITH_MPI") == "1"
    flags = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        # Also beside MPI: the lab's ranks find one another by Gloo's store.
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        ("HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI"): "1",
        # Horovod's bundled gloo asks for a CMake older than CMake 4 accepts.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    if nvidia_driver_present():
        flags |= {
            "HOROVOD_GPU": "CUDA",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            # The default is static, and the wheels of NCCL hold a shared library only.
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    return flags


def cache_key() -> str:
    """Returns a hash of what the wheel depends on: TensorFlow, Python, compiler, corrections."""
    # Not the corrections' reasons: another wording is the same wheel.
    parts = [
        HOROVOD_VERSION,
        _tensorflow_version() or "none",
        platform.python_implementation() + platform.python_version(),
        platform.machine(),
        _compiler_version(),
        repr(sorted(horovod_flags().items())),
        repr([(c.file, c.wrong, c.right) for c in CORRECTIONS]),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def install_tensorflow(release: str | None = None) -> None:
    """Installs TensorFlow and Keras where they are missing; keeps what is there.

    Args:
      release: Release of TensorFlow, such as `"2.20"`; see `tensorflow_requirement` for the
        default.

    Raises:
      UnsupportedVersionError: If there are no wheels of `release` for this Python.
      InstallError: If another release is installed already.
    """
    if release:
        versions.require_tensorflow("tensorflow", release)
    present = _tensorflow_version()
    if present is None:
        requirement = tensorflow_requirement(release)
        _say(f"installing {requirement} and keras=={KERAS_VERSION}")
        _pip("install", requirement, f"keras=={KERAS_VERSION}")
    elif release and versions.release_of(present.split()[1]) != release:
        raise InstallError(
            "TensorFlow is kept where it is installed. "
            f"Received: --tensorflow {release}, and {present} is installed. "
            f"Run: pip install '{present.split()[0]}=={release}.*', "
            "then python -m tfposeidon install"
        )


def install_horovod() -> None:
    """Installs Horovod from the cached wheel, building that first if need be.

    Raises:
      InstallError: With the last lines of the compiler, and what to install.
      UnsupportedVersionError: If the installed TensorFlow is not supported.
    """
    present = _tensorflow_version()
    if present is None:
        raise InstallError(
            "Horovod is built against TensorFlow, which is missing here. "
            "Run: python -m tfposeidon install (without --horovod-only)."
        )
    versions.require_tensorflow(*present.split())
    folder = cache_folder() / cache_key()
    wheels = sorted(folder.glob("horovod-*.whl"))
    if not wheels:
        wheels = [_build_into(folder)]
    _say(f"installing {wheels[0]}")
    # Forced, as a wheel of the same version may be there that another TensorFlow was built against.
    _pip("install", "--force-reinstall", "--no-deps", str(wheels[0]))
    # What Horovod imports when it runs; setuptools and wheel were for the build.
    _pip("install", *BUILD_TOOLS[2:])


def _build_into(folder: Path) -> Path:
    """Builds the wheel in a scratch folder of the cache; a kill leaves no half a wheel."""
    _require_build_tools()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _pip("install", *BUILD_TOOLS)
    # In the cache, so that the wheel can be renamed into its place: that is atomic on one file
    # system only.
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as scratch:
        source = _corrected_source(Path(scratch))
        _say("building Horovod against TensorFlow (about two minutes on two cores)")
        _compile(source, Path(scratch) / "wheel", Path(scratch))
        wheel = next((Path(scratch) / "wheel").glob("horovod-*.whl"))
        folder.mkdir(exist_ok=True)
        os.replace(wheel, folder / wheel.name)
    return folder / wheel.name


def _corrected_source(scratch: Path) -> Path:
    requirement = f"horovod=={HOROVOD_VERSION}"
    _say(f"downloading the source of {requirement}")
    # Without isolation: pip runs setup.py to learn the name, with the setuptools installed above.
    _pip(
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--no-build-isolation",
        "-d",
        str(scratch),
        requirement,
    )
    archive = next(scratch.glob("horovod-*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    source = scratch / f"horovod-{HOROVOD_VERSION}"
    for correction in CORRECTIONS:
        correction.apply(source)
    return source


def _compile(source: Path, target: Path, scratch: Path) -> None:
    environment = os.environ | horovod_flags() | {"MAKEFLAGS": f"-j{os.cpu_count()}"}
    if nvidia_driver_present():
        environment |= _nccl_environment(scratch)
    # Without isolation: Horovod asks the installed TensorFlow for its headers and flags.
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(target),
    ]
    log = cache_folder() / "horovod-build.log"
    with log.open("w") as stream:
        result = subprocess.run(
            [*command, str(source)], env=environment, stdout=stream, stderr=subprocess.STDOUT
        )
    if result.returncode:
        raise InstallError(
            f"{_compilers_last_lines(log)}\n\nHorovod could not be built; all lines are in {log}. "
            "It needs a C++17 compiler, cmake, make and Python's headers: "
            "apt-get install g++ cmake make python3-dev "
            "(and libopenmpi-dev for HOROVOD_WITH_MPI=1)."
        )


def _compilers_last_lines(log: Path) -> str:
    # Horovod's setup.py and pip close with pages of their own, which say nothing of the cause.
    text = log.read_text(errors="replace")
    for closing in ("error: subprocess-exited-with-error", "Traceback (most recent call last)"):
        text, _, _ = text.partition(closing)
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])


def _nccl_environment(scratch: Path) -> dict[str, str]:
    """Returns variables that name the NCCL of `tensorflow[and-cuda]`, unless one is set."""
    spec = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
    if "HOROVOD_NCCL_HOME" in os.environ or spec is None or not spec.submodule_search_locations:
        return {}
    package = Path(next(iter(spec.submodule_search_locations)))
    # Horovod looks for `include` and `lib` in one folder.
    home = scratch / "nccl"
    (home / "lib").mkdir(parents=True)
    (home / "include").symlink_to(package / "include")
    # The wheel holds libnccl.so.2 alone; the linker looks for the name without a version.
    (home / "lib" / "libnccl.so").symlink_to(package / "lib" / "libnccl.so.2")
    return {"HOROVOD_NCCL_HOME": str(home), "LDFLAGS": f"-Wl,-rpath,{package / 'lib'}"}


def _require_build_tools() -> None:
    missing = [tool for tool in ("cmake", "make") if shutil.which(tool) is None]
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        missing.append("g++")
    if os.environ.get("HOROVOD_WITH_MPI") == "1" and shutil.which("mpicxx") is None:
        missing.append("libopenmpi-dev")
    if nvidia_driver_present() and shutil.which("nvcc", path=_nvcc_path()) is None:
        raise InstallError(
            "There is an NVIDIA driver, and Horovod is built with NCCL, "
            "for which it needs nvcc and the CUDA runtime. Missing: nvcc. "
            "Install the CUDA toolkit of TensorFlow's major version "
            "(apt-get install cuda-toolkit-12), or set HOROVOD_CUDA_HOME to where it is."
        )
    if missing:
        raise InstallError(
            "Building Horovod needs a C++ compiler, cmake and make. "
            f"Missing: {', '.join(missing)}. "
            f"Run: apt-get install {' '.join(missing)}"
        )


def _nvcc_path() -> str:
    home = os.environ.get("HOROVOD_CUDA_HOME", "/usr/local/cuda")
    return os.pathsep.join([os.path.join(home, "bin"), os.environ.get("PATH", "")])


def _tensorflow_version() -> str | None:
    # Read from its metadata and not imported, which takes seconds. pip may have installed it since
    # this process looked, so what Python remembers of folders is dropped.
    importlib.invalidate_caches()
    for name in ("tensorflow", "tensorflow-cpu", "tensorflow_cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _compiler_version() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return "none"
    command = [compiler, "-dumpfullversion", "-dumpversion"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        tail = "\n".join(result.stderr.splitlines()[-TAIL_LINES:])
        raise InstallError(
            f"{tail}\n\n`pip {' '.join(arguments)}` failed; its last lines are above."
        )


def _say(text: str) -> None:
    print(f"tfposeidon install: {text}", file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m tfposeidon install`.

    Args:
      parser: Parser of the command.
    """
    parser.add_argument("--horovod-only", action="store_true", help="leave TensorFlow as it is")
    parser.add_argument(
        "--tensorflow",
        choices=versions.TENSORFLOW,
        help="the release to install where there is none; "
        "default: the newest that is supported on this Python",
    )


def main(options: argparse.Namespace) -> int:
    """Runs `python -m tfposeidon install`.

    Args:
      options: Parsed options.

    Returns:
      The exit status; 1 where something could not be installed.
    """
    try:
        versions.require_python()
        if not options.horovod_only:
            install_tensorflow(options.tensorflow)
        install_horovod()
    except (InstallError, CorrectionError, versions.UnsupportedVersionError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
