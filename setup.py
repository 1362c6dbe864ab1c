"""Builds tfposeidon for the TensorFlow that is installed; refuses where there is none."""

import importlib.machinery
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("tfposeidon/native")
# No fused multiply-add, which not every processor has: all must round alike. Instruction sets beyond the
# baseline are chosen at run time (native/lib/passes.cc).
FLAGS = ["-O3", "-g0", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=off", "-fvisibility=hidden"]


def require(module: str, remedy: str) -> None:
    """Ends the build with a remedy if `module` is not installed in the target environment."""
    # pip builds in an isolated environment; what counts is the one it installs into.
    if importlib.machinery.PathFinder.find_spec(module, [*sys.path, sysconfig.get_path("purelib")]) is None:
        sys.exit(f"\ntfposeidon needs {module}, which is missing in {sys.prefix}.\n{remedy}\n")


class BuildNative(build_ext):
    """Compiles the native ops with the flags of the installed TensorFlow."""

    def get_ext_filename(self, fullname: str) -> str:
        """TensorFlow loads it, not Python: the name has no tag of an interpreter."""
        return os.path.join(*fullname.split(".")) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """None: ops register themselves."""
        return []

    def build_extensions(self) -> None:
        """Asks TensorFlow, then compiles."""
        flags, links = tensorflow_flags()
        for extension in self.extensions:
            # As system headers: what they warn of is not ours.
            extension.extra_compile_args = [re.sub("^-I", "-isystem", flag) for flag in flags] + FLAGS
            extension.extra_link_args = links
        super().build_extensions()


def tensorflow_flags() -> tuple[list[str], list[str]]:
    """How to compile for, and link with, the TensorFlow that is installed."""
    code = (
        "import json, tensorflow as tf;"
        "print(json.dumps([tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()]))"
    )
    # Without pip's isolated environment, which has no TensorFlow.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    compile_flags, link_flags = json.loads(output.stdout.splitlines()[-1])
    return compile_flags, link_flags


def native() -> Extension:
    """The library of native ops; made anew when any of its files is newer."""
    files = sorted(str(path) for path in NATIVE.rglob("*") if path.suffix in (".cc", ".h", ".inc"))
    sources = [name for name in files if name.endswith(".cc")]
    return Extension("tfposeidon.native._ops", sources, include_dirs=["."], depends=files, language="c++")


def version() -> str:
    """The one in `tfposeidon/__init__.py`."""
    text = Path(__file__).with_name("tfposeidon").joinpath("__init__.py").read_text()
    return re.search(r'__version__ = "(.+)"', text)[1]


if not {"sdist", "egg_info", "clean"} & set(sys.argv[1:2]):
    COMMAND = f"Run in this folder: {sys.executable} -m tfposeidon install"
    require(
        "tensorflow", f"{COMMAND}\nIt installs TensorFlow and Horovod with the corrections this needs; then repeat."
    )
    require("horovod", f"{COMMAND} --horovod-only\nIt builds Horovod against your TensorFlow; then repeat.")

setup(version=version(), ext_modules=[native()], cmdclass={"build_ext": BuildNative})
