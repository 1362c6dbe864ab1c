"""Reports versions, how Horovod was built and the nodes it sees, and runs a small collective.

Alone it checks this machine; under `horovodrun -np N python -m tfposeidon check` it checks the job.
The exit status is 1, with the remedy on the screen, if something is off.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import platform
import sys
from typing import Any

from tfposeidon.commands import install, versions
from tfposeidon.quiet import import_tensorflow


class CheckError(RuntimeError):
    """What is off, and the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m tfposeidon check`."""
    parser.add_argument("--ranks-per-node", type=int, help="as in tfposeidon.init()")


def main(options: argparse.Namespace) -> int:
    """Runs `python -m tfposeidon check`; returns the exit status."""
    try:
        lines = _versions()
        topology = _start(options.ranks_per_node)
        lines += [*_horovod_build(), f"topology      {topology}"]
        problems = _collective()
    except (CheckError, ImportError, ValueError, RuntimeError) as error:
        print(f"tfposeidon check: {error}", file=sys.stderr)
        return 1
    if topology.rank == 0:
        print(
            "\n".join(
                [*lines, f"collective    sums are right on all {topology.size} rank(s)", *problems]
            )
        )
    return 1 if problems else 0


def _versions() -> list[str]:
    lines = [f"python        {platform.python_version()} on {platform.machine()}"]
    for names in (("tensorflow", "tensorflow-cpu"), ("keras",), ("horovod",), ("numpy",)):
        version = next((v for v in map(_version, names) if v), None)
        if version is None:
            raise CheckError(f"{names[0]} is missing. Run: python -m tfposeidon install")
        lines.append(f"{names[0]:<13} {version}")
    _check_tensorflow()
    keras = _version("keras") or ""
    if not keras.startswith(install.KERAS_VERSION.rstrip("*")):
        raise CheckError(
            f"Keras {install.KERAS_VERSION} is needed. Received: {keras}. Run: pip install "
            f"'keras=={install.KERAS_VERSION}'"
        )
    if not (_version("horovod") or "").endswith(install.CORRECTED_MARK):
        raise CheckError(
            f"Horovod needs corrections to work over several hosts. Received: {_version('horovod')} without them. "
            "Run: python -m tfposeidon install --horovod-only"
        )
    return lines


def _check_tensorflow() -> None:
    package, version = next(
        (name, version)
        for name in ("tensorflow", "tensorflow-cpu")
        if (version := _version(name)) is not None
    )
    versions.require_tensorflow(package, version)
    built_for = install.built_for()
    if built_for and versions.release_of(built_for) != versions.release_of(version):
        raise CheckError(
            "The native library must be built for the TensorFlow that loads it. "
            f"Received: TensorFlow {version} and a library for {built_for}. "
            "Run in tfposeidon's folder: pip install --force-reinstall --no-deps ."
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _start(ranks_per_node: int | None) -> Any:
    import_tensorflow()
    from tfposeidon.communication import runtime

    return runtime.init(ranks_per_node=ranks_per_node)


def _horovod_build() -> list[str]:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    built = [name for name in ("gloo", "mpi", "nccl", "cuda") if getattr(hvd, f"{name}_built")()]
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus and "nccl" not in built:
        raise CheckError(
            f"There are {gpus} GPU(s), but Horovod was built without NCCL. Remove {install.cache_folder()} and run: "
            "python -m tfposeidon install --horovod-only"
        )
    return [
        f"built with    {', '.join(built)}; ranks find one another over {controller}",
        f"GPUs          {gpus}",
    ]


def _collective() -> list[str]:
    """Runs every scheme once in graph mode, sparse ones so that they send everything; returns what was wrong."""
    import tensorflow as tf

    from tfposeidon.communication import runtime
    from tfposeidon.schemes import REGISTRY

    wire = runtime.wire()
    topology = wire.topology
    expected = (topology.size - 1) / 2
    problems = []
    for name, make in REGISTRY.items():
        exchange = tf.function(functools.partial(_exchanged, make(), wire, name))
        mean = exchange(tf.constant([float(topology.rank)] * 5)).numpy()
        if abs(mean - expected).max() > 1e-3:
            problems.append(
                f"PROBLEM: scheme {name!r} gave {mean} instead of {expected}; reinstall Horovod with "
                "python -m tfposeidon install --horovod-only"
            )
    return problems


def _exchanged(scheme: Any, wire: Any, name: str, vector: Any) -> Any:
    import tensorflow as tf

    from tfposeidon.gradients.factors import Factors

    if scheme.needs_factors:
        return scheme.exchange_factors(
            Factors(vector[:1, None], tf.ones_like(vector)[None]), wire, f"check.{name}"
        )
    state = scheme.flushing(
        tuple(tf.zeros(slot.shape) for slot in scheme.slots(vector.shape[0], wire.topology))
    )
    return scheme.exchange(vector, state, wire, f"check.{name}")[0]
