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

from tfposeidon.commands import cuda, versions
from tfposeidon.commands.corrections import CORRECTIONS, HOROVOD_VERSION, CorrectionError

KERAS_VERSION = f"{versions.KERAS}.*"
BUILD_TOOLS = ("setuptools>=77,<80", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
TAIL_LINES = 25
LIBRARY = Path(__file__).parents[1] / "native" / "_ops.so"


class InstallError(RuntimeError):
    """An installation that failed, with the cause and the remedy."""


def tensorflow_requirement(with_cuda: bool, release: str | None = None) -> str:
    """Returns what pip is asked for; the wheel for CPUs has half the size.

    Args:
      with_cuda: True for a TensorFlow that runs on GPUs.
      release: Release of TensorFlow, such as `"2.20"`; by default the one that the native library
        was built for, else the newest that is supported on this Python.
    """
    release = release or versions.release_of(built_for() or versions.tensorflow_releases()[-1])
    if with_cuda:
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


def horovod_flags(with_cuda: bool) -> dict[str, str]:
    """Returns Horovod's build options: Gloo always, MPI and NCCL where asked for."""
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
    if with_cuda:
        flags |= {
            "HOROVOD_GPU": "CUDA",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            # The default is static, and the wheels of NCCL hold a shared library only.
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    return flags


def cache_key(with_cuda: bool) -> str:
    """Returns a hash of what the wheel depends on: TensorFlow, Python, compilers, corrections."""
    # Not the corrections' reasons: another wording is the same wheel.
    parts = [
        HOROVOD_VERSION,
        _tensorflow_version() or "none",
        platform.python_implementation() + platform.python_version(),
        platform.machine(),
        _compiler_version(),
        repr(sorted(horovod_flags(with_cuda).items())),
        repr([(c.file, c.wrong, c.right) for c in CORRECTIONS]),
    ]
    if with_cuda:
        toolkit = cuda.require_toolkit()
        nccl = cuda.require_nccl(toolkit)
        parts += [cuda.dotted(toolkit.version), nccl.version, nccl.rpath]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def install_tensorflow(with_cuda: bool, release: str | None = None) -> None:
    """Installs TensorFlow and Keras where they are missing; keeps what is there.

    Args:
      with_cuda: True for a TensorFlow that runs on GPUs, with the libraries that it needs.
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
        requirement = tensorflow_requirement(with_cuda, release)
        _say(f"installing {requirement} and keras=={KERAS_VERSION}")
        _pip("install", requirement, f"keras=={KERAS_VERSION}")
    elif release and versions.release_of(present.split()[1]) != release:
        raise InstallError(
            "TensorFlow is kept where it is installed. "
            f"Received: --tensorflow {release}, and {present} is installed. "
            f"Run: pip install '{present.split()[0]}=={release}.*', "
            "then python -m tfposeidon install"
        )


def install_horovod(with_cuda: bool) -> None:
    """Installs Horovod from the cached wheel, building that first if need be.

    Args:
      with_cuda: True to build it with NCCL; no driver is needed for that.

    Raises:
      InstallError: With the last lines of the compiler, and what to install.
      CudaError: If nvcc or NCCL is missing, or nvcc does not suit the driver that is loaded.
      UnsupportedVersionError: If the installed TensorFlow is not supported.
    """
    present = _tensorflow_version()
    if present is None:
        raise InstallError(
            "Horovod is built against TensorFlow, which is missing here. "
            "Run: python -m tfposeidon install (without --horovod-only)."
        )
    versions.require_tensorflow(*present.split())
    if with_cuda:
        _require_tensorflow_with_cuda(present)
    folder = cache_folder() / cache_key(with_cuda)
    wheels = sorted(folder.glob("horovod-*.whl"))
    if not wheels:
        wheels = [_build_into(folder, with_cuda)]
    _say(f"installing {wheels[0]}")
    # Forced, as a wheel of the same version may be there that another TensorFlow was built against.
    _pip("install", "--force-reinstall", "--no-deps", str(wheels[0]))
    # What Horovod imports when it runs; setuptools and wheel were for the build.
    _pip("install", *BUILD_TOOLS[2:])


def _require_tensorflow_with_cuda(present: str) -> None:
    if cuda.tensorflow_cuda() is None:
        release = versions.release_of(present.split()[1])
        raise InstallError(
            "A Horovod with NCCL needs a TensorFlow for GPUs. "
            f"Received: {present}, which is for CPUs. "
            f"Run: pip uninstall -y {present.split()[0]}, "
            f"then pip install 'tensorflow[and-cuda]=={release}.*' and repeat; "
            "or add --no-cuda to train on CPUs."
        )


def _build_into(folder: Path, with_cuda: bool) -> Path:
    """Builds the wheel in a scratch folder of the cache; a kill leaves no half a wheel."""
    require_build_tools()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _pip("install", *BUILD_TOOLS)
    # In the cache, so that the wheel can be renamed into its place: that is atomic on one file
    # system only.
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as scratch:
        source = _corrected_source(Path(scratch))
        _say("building Horovod against TensorFlow (about two minutes on two cores)")
        compile_horovod(source, Path(scratch) / "wheel", Path(scratch), with_cuda)
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


def compile_horovod(source: Path, target: Path, scratch: Path, with_cuda: bool) -> None:
    """Compiles a wheel of Horovod into a folder; the end of its log is in the error."""
    environment = os.environ | horovod_flags(with_cuda) | {"MAKEFLAGS": f"-j{os.cpu_count()}"}
    if with_cuda:
        environment |= cuda_environment(scratch)
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


def cuda_environment(scratch: Path) -> dict[str, str]:
    """Returns variables that name the CUDA toolkit and NCCL to Horovod's build."""
    toolkit = cuda.require_toolkit()
    nccl = cuda.require_nccl(toolkit)
    for_tensorflow = cuda.tensorflow_cuda() or "unknown"
    _say(
        f"with nvcc {cuda.dotted(toolkit.version)} in {toolkit.home} (TensorFlow: CUDA "
        f"{for_tensorflow}) and NCCL {nccl.version} of {nccl.library}"
    )
    if not for_tensorflow.startswith(f"{toolkit.version[0]}."):
        needed = cuda.DRIVERS.get(toolkit.version[0], "that supports it")
        _say(f"what is built will need NVIDIA's driver {needed} or later on each machine")
    # Wheels hold libnccl.so.2 and libcudart.so.13 alone: CMake looks for names without a version.
    links = scratch / "links"
    links.mkdir()
    (links / "libnccl.so").symlink_to(nccl.library)
    runtimes = toolkit.static_runtime.parent
    if not (runtimes / "libcudart.so").exists():
        for shared in [*runtimes.glob("libcudart.so*")][:1]:
            (links / "libcudart.so").symlink_to(shared)
        (links / "libcudart_static.a").symlink_to(toolkit.static_runtime)
    return {
        "CMAKE_LIBRARY_PATH": str(links),
        # Horovod's build asks the nvcc of the path which GPUs it knows.
        "PATH": os.pathsep.join([str(toolkit.home / "bin"), os.environ.get("PATH", "")]),
        "HOROVOD_CUDA_HOME": str(toolkit.home),
        "HOROVOD_NCCL_INCLUDE": str(nccl.include),
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_RPATH": nccl.rpath,
    }


def require_build_tools() -> None:
    """Refuses a machine without the programs that Horovod's build calls."""
    missing = [tool for tool in ("cmake", "make") if shutil.which(tool) is None]
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        missing.append("g++")
    if os.environ.get("HOROVOD_WITH_MPI") == "1" and shutil.which("mpicxx") is None:
        missing.append("libopenmpi-dev")
    if missing:
        raise InstallError(
            "Building Horovod needs a C++ compiler, cmake and make. "
            f"Missing: {', '.join(missing)}. "
            f"Run: apt-get install {' '.join(missing)}"
        )


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


def for_gpus() -> bool:
    """Returns whether to install for GPUs where nobody says: if a driver and TensorFlow are."""
    if not cuda.driver_present():
        return False
    present = _tensorflow_version()
    if present and cuda.tensorflow_cuda() is None:
        _say(f"{present} is for CPUs, so Horovod is built without NCCL; --cuda says what to change")
        return False
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m tfposeidon install`.

    Args:
      parser: Parser of the command.
    """
    parser.add_argument("--horovod-only", action="store_true", help="leave TensorFlow as it is")
    parser.add_argument(
        "--cuda",
        action=argparse.BooleanOptionalAction,
        help="install for GPUs: TensorFlow with CUDA, and Horovod with NCCL; it needs nvcc and no "
        "driver; default: if an NVIDIA driver is loaded",
    )
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
        with_cuda = for_gpus() if options.cuda is None else options.cuda
        if with_cuda:
            # Before gigabytes are downloaded.
            cuda.require_toolkit()
        if not options.horovod_only:
            install_tensorflow(with_cuda, options.tensorflow)
        install_horovod(with_cuda)
    except (
        InstallError,
        CorrectionError,
        cuda.CudaError,
        versions.UnsupportedVersionError,
    ) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
