"""Installs the dependencies of tfposeidon: TensorFlow, and a patched Horovod.

Without patches, the last release of Horovod, 0.28.1, neither compiles against TensorFlow 2.16 or
later nor connects several hosts over Gloo. `python -m tfposeidon install` downloads its source,
applies the patches in `corrections`, builds a wheel and stores it in a per-user cache, so that the
next installation on this machine takes seconds. `versions` lists the supported releases of Python
and TensorFlow.

This module imports only the standard library, because it runs before any dependency is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tfposeidon.commands import cuda, versions
from tfposeidon.commands.corrections import CORRECTIONS, HOROVOD_VERSION
from tfposeidon.commands.versions import InstallError

KERAS_VERSION = f"{versions.KERAS}.*"
BUILD_TOOLS = ("setuptools>=77,<80", "wheel", "packaging", "cloudpickle", "psutil", "pyyaml")
TAIL_LINES = 25
LIBRARY = Path(__file__).parents[1] / "native" / "_ops.so"


def tensorflow_requirement(with_cuda: bool, release: str | None = None) -> str:
    """Returns pip's requirement for TensorFlow; `release` defaults to the native library's."""
    # Without a native library, default to the newest release for this Python. For CPUs,
    # tensorflow-cpu has half the size of tensorflow.
    release = release or versions.release_of(built_for() or versions.tensorflow_releases()[-1])
    return f"{'tensorflow[and-cuda]' if with_cuda else 'tensorflow-cpu'}=={release}.*"


def built_for(library: Path = LIBRARY) -> str | None:
    """Returns the TensorFlow version of the native library, or `None` if it is unknown."""
    if not library.exists():
        return None
    match = re.search(rb"tfposeidon built for TensorFlow ([0-9a-z.]+)", library.read_bytes())
    return match[1].decode() if match else None


def target_has(module: str) -> bool:
    """Returns whether the environment has a top-level module, even in pip's isolated build."""
    path = _path_of_environment(without_isolation())
    return importlib.machinery.PathFinder.find_spec(module, path) is not None


def without_isolation() -> dict[str, str]:
    """Returns the environment variables, except the variables with which pip isolates a build."""
    isolating = ("PYTHONPATH", "PYTHONNOUSERSITE")
    return {name: value for name, value in os.environ.items() if name not in isolating}


def _path_of_environment(variables: dict[str, str]) -> list[str]:
    """Returns `sys.path` of a new interpreter, which sees a user site that pip has just created."""
    code = "import json, sys; print(json.dumps(sys.path[1:]))"
    command = [sys.executable, "-c", code]
    output = subprocess.run(command, env=variables, capture_output=True, text=True)
    # Read the last line only, because code that runs at every start of Python may print.
    return json.loads(output.stdout.splitlines()[-1])


def cache_folder() -> Path:
    """Returns the per-user folder of built wheels: `$XDG_CACHE_HOME/tfposeidon/wheels`."""
    # Unlike `Path.expanduser`, this raises no error for a user without a home folder.
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "tfposeidon/wheels"


def horovod_flags(with_cuda: bool) -> dict[str, str]:
    """Returns Horovod's build options: Gloo always, MPI and NCCL on request."""
    with_mpi = os.environ.get("HOROVOD_WITH_MPI") == "1"
    flags = {
        "HOROVOD_WITH_TENSORFLOW": "1",
        # Build Gloo even with MPI, because the lab's ranks connect through Gloo's key-value store.
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        ("HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI"): "1",
        # CMake 4 rejects the minimum version that the bundled Gloo declares.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
    }
    if with_cuda:
        flags |= {
            "HOROVOD_GPU": "CUDA",
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            # Horovod links NCCL statically by default, but NCCL's wheels lack the static library.
            "HOROVOD_NCCL_LINK": "SHARED",
        }
    return flags


def cache_key(with_cuda: bool) -> str:
    """Returns a hash of the build's inputs: TensorFlow, Python, compilers, options, patches."""
    parts = [
        HOROVOD_VERSION,
        _tensorflow_version() or "none",
        platform.python_implementation() + platform.python_version(),
        platform.machine(),
        _printed_by(os.environ.get("CXX", "g++"), "-dumpfullversion", "-dumpversion"),
        repr(sorted(horovod_flags(with_cuda).items())),
        repr([(c.file, c.wrong, c.right) for c in CORRECTIONS]),
    ]
    if os.environ.get("HOROVOD_WITH_MPI") == "1":
        # The printed flags name the MPI libraries, which differ between Open MPI, MPICH and their
        # releases.
        parts.append(_printed_by("mpicxx", "-show"))
    if with_cuda:
        toolkit = cuda.require_toolkit()
        nccl = cuda.require_nccl(toolkit)
        parts += [cuda.dotted(toolkit.version), nccl.version, nccl.rpath]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def install_tensorflow(with_cuda: bool, release: str | None = None) -> None:
    """Installs TensorFlow and Keras, unless a TensorFlow of this release is installed."""
    present = _tensorflow_version()
    if present is None:
        requirement = tensorflow_requirement(with_cuda, release)
        _say(f"installing {requirement} and keras=={KERAS_VERSION}")
        _pip("install", requirement, f"keras=={KERAS_VERSION}")
    elif release and versions.release_of(present.split()[1]) != release:
        raise InstallError(
            "This command does not replace an installed TensorFlow. Received: --tensorflow "
            f"{release}, but {present} is installed. Run: pip install "
            f"'{present.split()[0]}=={release}.*', then python -m tfposeidon install"
        )


def install_horovod(with_cuda: bool) -> None:
    """Installs Horovod from the cache, after building its wheel if necessary."""
    present = _tensorflow_version()
    if present is None:
        raise InstallError(
            "Building Horovod requires TensorFlow, which is not installed. "
            "Run: python -m tfposeidon install (without --horovod-only)."
        )
    package, version = present.split()
    versions.require_tensorflow(package, version)
    if with_cuda and cuda.tensorflow_cuda() is None:
        raise InstallError(
            "Horovod with NCCL requires TensorFlow for GPUs. "
            f"Received: {present}, which is for CPUs. Run: pip uninstall -y {package}, "
            f"then pip install 'tensorflow[and-cuda]=={versions.release_of(version)}.*', and "
            "repeat this command; or add --no-cuda to train on CPUs."
        )
    folder = cache_folder() / cache_key(with_cuda)
    wheels = sorted(folder.glob("horovod-*.whl"))
    if not wheels:
        wheels = [_build_into(folder, with_cuda)]
    _say(f"installing {wheels[0]}")
    # Replace an installed Horovod, because it may have been built for another TensorFlow.
    _pip("install", "--force-reinstall", "--no-deps", str(wheels[0]))
    # Install Horovod's runtime dependencies; only the build requires setuptools and wheel.
    _pip("install", *BUILD_TOOLS[2:])


def _build_into(folder: Path, with_cuda: bool) -> Path:
    """Builds the wheel and moves it into `folder`; a killed build leaves no partial wheel there."""
    require_build_tools()
    folder.parent.mkdir(parents=True, exist_ok=True)
    _pip("install", *BUILD_TOOLS)
    # The temporary folder is in the cache, because a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as scratch:
        source = _corrected_source(Path(scratch))
        _say("building Horovod against TensorFlow (about two minutes on two cores)")
        wheel = compile_horovod(source, Path(scratch), with_cuda)
        folder.mkdir(exist_ok=True)
        os.replace(wheel, folder / wheel.name)
    return folder / wheel.name


def _corrected_source(scratch: Path) -> Path:
    requirement = f"horovod=={HOROVOD_VERSION}"
    _say(f"downloading the source of {requirement}")
    # pip runs setup.py to read the name. Without isolation, it uses the setuptools installed above.
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(scratch)]
    _pip("download", *options, requirement)
    archive = next(scratch.glob("horovod-*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(scratch, filter="data")
    source = scratch / f"horovod-{HOROVOD_VERSION}"
    for correction in CORRECTIONS:
        correction.apply(source)
    return source


def compile_horovod(source: Path, scratch: Path, with_cuda: bool) -> Path:
    """Compiles a wheel of Horovod in `scratch`; raises `InstallError` with the end of the log."""
    environment = os.environ | horovod_flags(with_cuda) | {"MAKEFLAGS": f"-j{os.cpu_count()}"}
    if with_cuda:
        environment |= cuda_environment(scratch)
    # Without isolation, the build finds the headers and flags of the installed TensorFlow.
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    command += ["-w", str(scratch / "wheel"), str(source)]
    log = cache_folder() / "horovod-build.log"
    with log.open("w") as stream:
        result = subprocess.run(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    if result.returncode:
        text = log.read_text(errors="replace")
        # Cut the long messages that setup.py and pip print last, which do not contain the cause.
        for closing in ("error: subprocess-exited-with-error", "Traceback (most recent call last)"):
            text = text.partition(closing)[0]
        last_lines = "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])
        raise InstallError(
            f"{last_lines}\n\nHorovod could not be built; the full log is {log}. "
            "The build requires a C++17 compiler, cmake, make and Python's headers: "
            "apt-get install g++ cmake make python3-dev "
            "(and libopenmpi-dev for HOROVOD_WITH_MPI=1)."
        )
    return next((scratch / "wheel").glob("horovod-*.whl"))


def cuda_environment(scratch: Path) -> dict[str, str]:
    """Links CUDA and NCCL in `scratch`; returns the environment variables of the build."""
    toolkit = cuda.require_toolkit()
    nccl = cuda.require_nccl(toolkit)
    needed = cuda.DRIVERS.get(toolkit.version[0], "for this CUDA")
    _say(
        f"using NCCL {nccl.version} of {nccl.library}, and nvcc {cuda.dotted(toolkit.version)} in "
        f"{toolkit.home}, whose code requires NVIDIA's driver {needed} or later on each machine"
    )
    # Link the libraries under the unversioned names that CMake looks for, because wheels contain
    # only libnccl.so.2 and libcudart.so.13.
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
        # Horovod's build asks the nvcc on PATH which GPUs it supports.
        "PATH": os.pathsep.join([str(toolkit.home / "bin"), os.environ.get("PATH", "")]),
        "HOROVOD_CUDA_HOME": str(toolkit.home),
        "HOROVOD_NCCL_INCLUDE": str(nccl.include),
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_RPATH": nccl.rpath,
    }


def require_build_tools() -> None:
    """Raises `InstallError` if a program that Horovod's build calls is missing."""
    missing = [tool for tool in ("cmake", "make") if shutil.which(tool) is None]
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        missing.append("g++")
    if os.environ.get("HOROVOD_WITH_MPI") == "1" and shutil.which("mpicxx") is None:
        missing.append("libopenmpi-dev")
    if missing:
        raise InstallError(
            "Building Horovod requires a C++ compiler, cmake and make, and MPI's compiler for MPI. "
            f"Missing: {', '.join(missing)}. Run: apt-get install {' '.join(missing)}"
        )


def _tensorflow_version() -> str | None:
    # Read the metadata, because importing TensorFlow takes seconds. Invalidate Python's caches of
    # folders, because pip may have installed TensorFlow after this process started.
    importlib.invalidate_caches()
    path = _path_of_environment(dict(os.environ))
    for name in ("tensorflow", "tensorflow-cpu"):
        for found in importlib.metadata.distributions(name=name, path=path):
            return f"{name} {found.version}"
    return None


def _printed_by(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "none"
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _pip(*arguments: str) -> None:
    # With -qq, pip prints errors only.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", *arguments]
    if subprocess.run(command).returncode:
        raise InstallError(f"`pip {' '.join(arguments)}` failed; its messages are above.")


def _say(text: str) -> None:
    print(f"tfposeidon install: {text}", file=sys.stderr, flush=True)


def for_gpus() -> bool:
    """Returns the default of `--cuda`: true with a driver, unless TensorFlow is for CPUs."""
    if cuda.driver_version() is None:
        return False
    present = _tensorflow_version()
    if present and cuda.tensorflow_cuda() is None:
        _say(f"{present} is for CPUs, so Horovod is built without NCCL; --cuda prints the remedy")
        return False
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--horovod-only", action="store_true", help="do not install TensorFlow")
    parser.add_argument(
        "--cuda",
        action=argparse.BooleanOptionalAction,
        help="install TensorFlow with CUDA, and Horovod with NCCL; requires nvcc, but no driver "
        "(default: if an NVIDIA driver is loaded)",
    )
    parser.add_argument(
        "--tensorflow",
        choices=versions.tensorflow_releases(),
        help="release of TensorFlow to install if it is missing "
        "(default: that of the native library, or else the newest for this Python)",
    )


def main(options: argparse.Namespace) -> int:
    """Returns the exit status: 1 if an installation failed, else 0."""
    try:
        with_cuda = for_gpus() if options.cuda is None else options.cuda
        if with_cuda:
            # Fail before pip downloads gigabytes.
            cuda.require_toolkit()
        if not options.horovod_only:
            install_tensorflow(with_cuda, options.tensorflow)
        install_horovod(with_cuda)
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    return 0
