"""Lists the supported releases of Python, TensorFlow and Keras, and refuses all others.

`setup.py` and `build_backend.py` import this module before any dependency is installed, and `python
-m tfposeidon` imports it on a Python that may be too old. It therefore imports only the standard
library, and uses no syntax newer than Python 3.7.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

PYTHON = ("3.11", "3.12", "3.13")
TENSORFLOW = ("2.19", "2.20", "2.21")
FIRST_TENSORFLOW = {"3.13": "2.20"}
"""First supported TensorFlow with wheels for a Python release, if it is not `TENSORFLOW[0]`."""
KERAS = "3.15"


class InstallError(RuntimeError):
    """Raised if a component is missing, unsupported or broken; the message has the remedy."""


def running_python() -> str:
    """Returns the release of the running interpreter, such as `"3.12"`."""
    return "{}.{}".format(*sys.version_info[:2])


def require_python() -> None:
    """Raises `InstallError` unless tfposeidon supports the running Python."""
    if running_python() not in PYTHON:
        received = ".".join(map(str, sys.version_info[:3]))
        raise InstallError(
            f"tfposeidon requires Python {either(PYTHON)}. "
            f"Received: Python {received} in {sys.executable}. "
            f"Create an environment with one of them: python{PYTHON[-1]} -m venv .venv"
        )


def tensorflow_releases(python: str | None = None) -> tuple[str, ...]:
    """Returns the supported TensorFlow releases with wheels for `python`, oldest first.

    The default is the running Python.
    """
    first = FIRST_TENSORFLOW.get(python or running_python(), TENSORFLOW[0])
    return TENSORFLOW[TENSORFLOW.index(first) :]


def require_tensorflow(package: str, version: str) -> None:
    """Raises `InstallError` for unsupported versions, such as `"2.21.0"` or `"2.21"`."""
    release = release_of(version)
    releases = tensorflow_releases()
    if release in releases:
        return
    where = f" on Python {running_python()}" if release in TENSORFLOW else ""
    raise InstallError(
        f"tfposeidon requires TensorFlow {either(releases)}{where}. Received: {package} {version}. "
        f"Run: pip install '{package}=={releases[-1]}.*', "
        "then python -m tfposeidon install --horovod-only"
    )


def release_of(version: str) -> str:
    """Returns the first two numbers of a version: `"2.21"` for `"2.21.0rc1"`."""
    return ".".join(version.split(".")[:2])


def either(names: Sequence[str]) -> str:
    """Joins names with commas and "or", as in `"2.19, 2.20 or 2.21"`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
