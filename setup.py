"""Builds tfposeidon for the TensorFlow that is installed; refuses where there is none."""

import importlib.machinery
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import setup


def require(module: str, remedy: str) -> None:
    """Ends the build with a remedy if `module` is not installed in the target environment."""
    # pip builds in an isolated environment; what counts is the one it installs into.
    if importlib.machinery.PathFinder.find_spec(module, [*sys.path, sysconfig.get_path("purelib")]) is None:
        sys.exit(f"\ntfposeidon needs {module}, which is missing in {sys.prefix}.\n{remedy}\n")


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

setup(version=version())
