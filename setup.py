"""Builds tfposeidon for the TensorFlow that is installed; refuses where there is none."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import OptionError

from tfposeidon.commands import versions

try:
    # Before modules whose syntax an older Python lacks.
    versions.require_python()
except versions.InstallError as error:
    sys.exit(f"\n{error}\n")

from tfposeidon.commands import cuda, install

NATIVE = Path("tfposeidon/native")
CUDA_SOURCE = NATIVE / "lib/gpu/gpu.cu"
# No fused multiply-add, which not every CPU has: all must round alike. Instruction sets beyond the
# baseline are chosen at run time (native/lib/inner_loops.cc).
# Selection reads the bits of floats as integers, which strict aliasing would not allow.
FLAGS = [
    "-O3",
    "-g0",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
]
# From the V100 on, as far as nvcc knows them; the last also as PTX, for what comes after it.
GPUS = (70, 75, 80, 90, 100)
CUDA_FLAGS = [
    "-std=c++17",
    "-O3",
    "--fmad=false",
    "--threads=0",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
]


def require_supported() -> None:
    """Ends the build with a remedy where TensorFlow is missing."""
    # In the build, or in the environment, whose user's site-packages an isolated build hides.
    if not (importlib.util.find_spec("tensorflow") or install.target_has("tensorflow")):
        sys.exit(
            f"\ntfposeidon requires TensorFlow, which is not installed in {sys.prefix}.\n"
            f"Run in this folder: {sys.executable} -m tfposeidon install\n"
            "This command installs TensorFlow and a patched Horovod. Then repeat the build.\n"
        )


class BuildNative(build_ext):
    """Compiles the native ops with the flags of TensorFlow, and GPU kernels where it has GPUs."""

    user_options = [
        *build_ext.user_options,
        ("cuda", None, "compile GPU kernels also for a TensorFlow without GPU support"),
        (
            "gpus=",
            None,
            f"GPU architectures, such as 80,90; default: those of {','.join(map(str, GPUS))} that "
            "nvcc supports",
        ),
    ]
    boolean_options = [*build_ext.boolean_options, "cuda"]

    def initialize_options(self) -> None:
        """Sets the defaults: TensorFlow decides whether to compile for GPUs, and nvcc for which."""
        super().initialize_options()
        self.cuda = False
        self.gpus = None

    def finalize_options(self) -> None:
        """Reads `--gpus`.

        Raises:
          OptionError: If it is not a list of numbers.
        """
        super().finalize_options()
        try:
            self.gpus = GPUS if self.gpus is None else tuple(map(int, self.gpus.split(",")))
        except ValueError:
            raise OptionError(
                "`--gpus` must be a list of GPU architectures, such as 80,90. Received: "
                f"{self.gpus!r}"
            ) from None

    def get_ext_filename(self, fullname: str) -> str:
        """Returns a name without an interpreter's tag: TensorFlow loads the library, not Python."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Returns none: ops register themselves."""
        return []

    def build_extensions(self) -> None:
        """Asks TensorFlow, then compiles."""
        tensorflow, flags, links, has_gpus = tensorflow_flags()
        try:
            versions.require_tensorflow("tensorflow", tensorflow)
        except versions.InstallError as error:
            sys.exit(f"\n{error}\n")
        # What an earlier build has left is of this Python, but perhaps of another TensorFlow.
        self.force = self.force or tensorflow != self.built_for()
        for extension in self.extensions:
            if extension.language == "c":
                extension.extra_compile_args = FLAGS
                continue
            # As system headers: what they warn of is not ours.
            extension.extra_compile_args = [
                re.sub("^-I", "-isystem", flag) for flag in flags
            ] + FLAGS
            extension.define_macros = [("TFPOSEIDON_TENSORFLOW", f'"{tensorflow}"')]
            extension.extra_link_args = links
            if self.cuda or has_gpus:
                self.add_cuda(extension)
            extension.sources = self.joined(extension.sources)
        super().build_extensions()

    def joined(self, sources: list[str]) -> list[str]:
        """Joins the sources that need TensorFlow's headers, which take ten seconds to read."""
        lib = [name for name in sources if name.startswith(str(NATIVE / "lib"))]
        included = [f'#include "{name}"\n' for name in sources if name not in lib]
        file = Path(self.build_temp) / "tensorflow.cc"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(included))
        return [*lib, str(file)]

    def built_for(self) -> str | None:
        """Returns the TensorFlow of the library that is there, if any."""
        return install.built_for(Path(self.get_ext_fullpath("tfposeidon.native._ops")))

    def add_cuda(self, extension: Extension) -> None:
        """Compiles the GPU's library with nvcc, and adds it and its kernels."""
        try:
            toolkit = cuda.require_toolkit()
        except versions.InstallError as error:
            if self.cuda:
                sys.exit(f"\n{error}\n")
            self.warn(f"native ops on GPU tensors run on the CPU: {error}")
            return
        nvcc = str(toolkit.home / "bin" / "nvcc")
        known = subprocess.run(
            [nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True
        ).stdout.split()
        gpus = [gpu for gpu in self.gpus if f"compute_{gpu}" in known]
        # An nvcc may lack some of the default ones, but not those that were named.
        if (self.gpus is not GPUS and len(gpus) < len(self.gpus)) or (self.cuda and not gpus):
            sys.exit(
                f"\n`--gpus` must be architectures that nvcc supports. Received: {self.gpus}. "
                f"{nvcc} supports {', '.join(known)}.\n"
            )
        if not gpus:
            self.warn(
                f"nvcc supports none of the GPU architectures {self.gpus}: native ops on GPU "
                "tensors run on the CPU"
            )
            return
        library = Path(self.build_temp) / "gpu.o"
        library.parent.mkdir(parents=True, exist_ok=True)
        codes = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in gpus]
        codes += [f"-gencode=arch=compute_{gpus[-1]},code=compute_{gpus[-1]}"]
        self.spawn([nvcc, *CUDA_FLAGS, *codes, "-I.", "-c", str(CUDA_SOURCE), "-o", str(library)])
        extension.sources = extension.sources + [
            name for name in native_files(".cc") if name.endswith("_gpu.cc")
        ]
        # Before TensorFlow, which exports stubs of the runtime that open that of its own version.
        extension.extra_objects = [str(library), str(toolkit.static_runtime)]
        extension.extra_link_args += [
            f"-Wl,--exclude-libs,{toolkit.static_runtime.name}",
            # The static runtime needs these three.
            "-ldl",
            "-lrt",
            "-lpthread",
        ]


def tensorflow_flags() -> tuple[str, list[str], list[str], bool]:
    """Asks TensorFlow how to compile for it and link with it.

    Returns:
      Its version, the compiler's flags, the linker's, and whether it was built for GPUs.
    """
    code = (
        "import json, tensorflow as tf;"
        "config = [tf.__version__, tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags(),"
        "tf.test.is_built_with_cuda()];"
        "print(json.dumps(config))"
    )
    # Without pip's isolated environment: the TensorFlow that will load the library counts.
    has_own = install.target_has("tensorflow")
    environment = install.without_isolation() if has_own else dict(os.environ)
    output = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    if output.returncode:
        sys.exit(
            f"\n{output.stderr}\nThe native ops are compiled for the installed TensorFlow, which "
            f"cannot be imported: see above. Reinstall it for {sys.executable}.\n"
        )
    # Only the last line: importing TensorFlow may print others.
    return tuple(json.loads(output.stdout.splitlines()[-1]))


def native_files(*suffixes: str) -> list[str]:
    """Returns the native library's files with these suffixes, sorted."""
    return sorted(str(path) for path in NATIVE.rglob("*") if path.suffix in suffixes)


def native() -> Extension:
    """Returns the library of native ops, which is rebuilt when any of its files is newer."""
    files = native_files(".cc", ".cu", ".h", ".inc")
    sources = [name for name in native_files(".cc") if not name.endswith("_gpu.cc")]
    return Extension(
        "tfposeidon.native._ops", sources, include_dirs=["."], depends=files, language="c++"
    )


def records() -> Extension:
    """Returns the library that reads and copies samples: plain C, which needs no TensorFlow."""
    sources = [f"datacache/native/{name}.c" for name in ("files", "pages", "records")]
    return Extension("datacache.native._records", sources, language="c")


def version() -> str:
    """Returns the version in `tfposeidon/__init__.py`."""
    text = Path(__file__).with_name("tfposeidon").joinpath("__init__.py").read_text()
    return re.search(r'__version__ = "(.+)"', text)[1]


# These commands compile nothing, and so need no TensorFlow.
if not {"sdist", "egg_info", "clean"} & set(sys.argv[1:2]):
    require_supported()

setup(version=version(), ext_modules=[native(), records()], cmdclass={"build_ext": BuildNative})
