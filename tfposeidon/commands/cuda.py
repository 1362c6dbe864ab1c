"""Finds the CUDA toolkit, NCCL, and the CUDA versions of the driver and of TensorFlow.

Three versions matter. The driver supports programs up to one version of CUDA. nvcc compiles for its
own version and links the runtime of that version into the result. TensorFlow contains another
runtime. Two runtimes work in one process as long as the driver supports both.

This module imports only the standard library, because `install` and `setup.py` import it before any
dependency is installed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tfposeidon.commands.versions import InstallError

Version = tuple[int, int]
# This is the first release whose Thrust has `tabulate_output_iterator`.
OLDEST_NVCC = (12, 8)
DRIVERS = {12: "525", 13: "580"}
"""First release of NVIDIA's driver that supports each major version of CUDA."""
WHEELS_OF_NVCC = "nvidia-cuda-nvcc nvidia-cuda-cccl"


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """CUDA toolkit of one version: the folder with `bin/nvcc`, its headers and its runtime."""

    home: Path
    version: Version

    @property
    def static_runtime(self) -> Path:
        """Path of the CUDA runtime that Horovod and the native ops link; it may not exist."""
        # NVIDIA's installers, Debian's package and the wheels use different folders.
        folders = ("lib64", "lib/x86_64-linux-gnu", "targets/*/lib", "lib")
        found = (path for f in folders for path in self.home.glob(f"{f}/libcudart_static.a"))
        return next(found, self.home / "lib64" / "libcudart_static.a")


@dataclass(frozen=True, kw_only=True)
class Nccl:
    """NCCL's header and library; `version` is that of the header, such as `"2.27.7"`."""

    include: Path
    library: Path
    version: str

    @property
    def rpath(self) -> str:
        """Library folder for the loader, relative to Horovod if NCCL is in site-packages."""
        if Path(sysconfig.get_path("purelib")) in self.library.parents:
            # $ORIGIN is site-packages/horovod/tensorflow, so the wheel works in any environment.
            return "$ORIGIN/../../nvidia/nccl/lib"
        return str(self.library.parent)


@functools.cache
def driver_version() -> Version | None:
    """Returns the latest CUDA version that the driver supports; `None` without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    # This call neither requires nor occupies a GPU.
    if library.cuDriverGetVersion(ctypes.byref(number)) or not number.value:
        return None
    return number.value // 1000, number.value % 1000 // 10


def driver_text() -> str:
    """Returns the driver's release, if the kernel reports it, and its latest CUDA version."""
    latest, path = driver_version(), Path("/proc/driver/nvidia/version")
    if latest is None:
        return "none"
    match = re.search(r"\s(\d+\.\d+[.\d]*\s)", path.read_text()) if path.exists() else None
    return f"{match[1] if match else ''}for CUDA up to {dotted(latest)}"


def require_toolkit() -> Toolkit:
    """Returns the first toolkit that is complete, new enough, and not too new for the driver."""
    problems = []
    if given := os.environ.get("HOROVOD_CUDA_HOME"):
        homes = [Path(given)]
    else:
        wheels = (home for place in folders_of("nvidia") for home in sorted(place.glob("cu[0-9]*")))
        homes = [*_homes_of_nvcc(), Path("/usr/local/cuda"), *wheels]
    for home in homes:
        nvcc = home / "bin" / "nvcc"
        if nvcc.exists():
            toolkit = Toolkit(home=home, version=_version_of(nvcc))
            if (problem := _problem_with(toolkit)) is None:
                return toolkit
            problems.append(problem)
    looked_in = given or "PATH and /usr/local/cuda"
    problems.append(f"GPU code requires nvcc, which was not found in {looked_in}.")
    release = "{}-{}".format(*OLDEST_NVCC)
    raise InstallError(
        f"{problems[0]} Install nvcc {dotted(OLDEST_NVCC)} from NVIDIA's repository (apt-get "
        f"install cuda-nvcc-{release} cuda-cudart-dev-{release} cuda-cccl-{release}), or, for "
        f"drivers {DRIVERS[13]} and later, nvcc 13 (pip install {WHEELS_OF_NVCC}). Set "
        "HOROVOD_CUDA_HOME to use a toolkit in another folder, or run install --no-cuda."
    )


def _homes_of_nvcc() -> list[Path]:
    """Returns folders that may contain the toolkit of the nvcc on PATH."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return []
    # nvcc may be a script that calls another nvcc: Debian's calls one whose libraries are in /usr.
    dry_run = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    output = subprocess.run(dry_run, capture_output=True, text=True).stderr
    match = re.search(r"^#\$ _HERE_=(.+)$", output, re.MULTILINE)
    called = [Path(match[1]).parent] if match else []
    return [*called, Path(nvcc).resolve().parents[1], Path(nvcc).parents[1]]


def _problem_with(toolkit: Toolkit) -> str | None:
    if toolkit.version < OLDEST_NVCC:
        return (
            f"GPU code requires nvcc {dotted(OLDEST_NVCC)} or later. Received: nvcc "
            f"{dotted(toolkit.version)} in {toolkit.home}."
        )
    if not toolkit.static_runtime.exists():
        return f"nvcc requires libcudart_static.a, which was not found in {toolkit.home}."
    return problem_with_driver(dotted(toolkit.version))


def problem_with_driver(built_for: str) -> str | None:
    """Returns an error message, or `None` if the driver supports this CUDA or is not loaded."""
    driver, major = driver_version(), int(built_for.partition(".")[0])
    if driver is None or driver[0] >= major:
        return None
    needed = DRIVERS.get(major, "for this CUDA")
    return (
        f"Code for CUDA {built_for} requires NVIDIA's driver {needed} or later. Received: driver "
        f"{driver_text()}. Update the driver, or compile with an older nvcc."
    )


def _version_of(nvcc: Path) -> Version:
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", output)
    if match is None:
        raise InstallError(
            f"nvcc must run and print its release. Received from {nvcc} --version: {output!r}. "
            "Reinstall it, or set HOROVOD_CUDA_HOME to another toolkit."
        )
    return int(match[1]), int(match[2])


def require_nccl(toolkit: Toolkit) -> Nccl:
    """Returns the NCCL of `HOROVOD_NCCL_HOME`, or else of pip, the toolkit or /usr."""
    given = os.environ.get("HOROVOD_NCCL_HOME")
    places = [*(place / "nccl" for place in folders_of("nvidia")), toolkit.home, Path("/usr")]
    for home in [Path(given)] if given else places:
        for pattern in ("lib/libnccl.so*", "lib64/libnccl.so*", "lib/*-linux-gnu/libnccl.so*"):
            libraries, header = sorted(home.glob(pattern)), home / "include" / "nccl.h"
            if libraries and header.exists():
                definition = r"#define NCCL_(?:MAJOR|MINOR|PATCH) +(\d+)"
                version = ".".join(re.findall(definition, header.read_text(errors="replace")))
                return Nccl(include=header.parent, library=libraries[0], version=version)
    raise InstallError(
        "Horovod on GPUs requires NCCL: nccl.h and libnccl.so were not found in "
        f"{given or 'pip packages, the toolkit and /usr'}. Run: pip install nvidia-nccl-cu12 (or "
        "apt-get install libnccl-dev). Set HOROVOD_NCCL_HOME to use an NCCL in another folder."
    )


def folders_of(package: str) -> list[Path]:
    """Returns a package's folders without importing it; CUDA's wheels are in "nvidia"."""
    # pip may have installed the package after Python cached the folders.
    importlib.invalidate_caches()
    # In pip's isolated build, sys.path does not contain the folders of the environment.
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    path = [*sys.path, *installed, site.getusersitepackages()]
    spec = importlib.machinery.PathFinder.find_spec(package, path)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]


def tensorflow_cuda() -> str | None:
    """Returns the CUDA version of TensorFlow, or `None` if it is for CPUs or not installed."""
    # Read the file, because importing TensorFlow takes seconds.
    for folder in folders_of("tensorflow"):
        path = folder / "python/platform/build_info.py"
        text = path.read_text() if path.exists() else ""
        if match := re.search(r"'cuda_version', '([0-9.]+)'", text):
            return match[1]
    return None


def dotted(version: Iterable[int]) -> str:
    """Returns a version as text, such as `"12.9"`."""
    return ".".join(map(str, version))
