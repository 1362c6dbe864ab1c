"""Builds wheels with setuptools, against the TensorFlow of the environment that pip installs into.

Native ops are compiled with TensorFlow's headers. Where that environment has no TensorFlow, the
newest supported release is put into pip's isolated build environment, so that `pip install` works
in an empty environment too. `python -m tfposeidon install` then adds Horovod, and TensorFlow in the
release that the library was built for.
"""

from __future__ import annotations

from collections.abc import Mapping

from setuptools import build_meta

# The other hooks of PEP 517 and PEP 660 are setuptools' own.
from setuptools.build_meta import *  # noqa: F403

from tfposeidon.commands import versions

versions.require_python()  # Before modules whose syntax an older Python lacks.

from tfposeidon.commands import cuda, install  # noqa: E402


def get_requires_for_build_wheel(config_settings: Mapping[str, str] | None = None) -> list[str]:
    """Returns what setuptools asks for, and TensorFlow if it is not installed."""
    return build_meta.get_requires_for_build_wheel(config_settings) + _tensorflow()


def get_requires_for_build_editable(config_settings: Mapping[str, str] | None = None) -> list[str]:
    """Returns what setuptools asks for, and TensorFlow if it is not installed."""
    return build_meta.get_requires_for_build_editable(config_settings) + _tensorflow()


def _tensorflow() -> list[str]:
    if install.target_has("tensorflow"):
        return []
    # CUDA's libraries are not needed to compile.
    package = "tensorflow" if cuda.driver_version() else "tensorflow-cpu"
    return [f"{package}=={versions.tensorflow_releases()[-1]}.*"]
