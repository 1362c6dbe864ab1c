"""Reports versions, Horovod's build, GPUs and topology, and averages a vector with every scheme.

A single process checks this machine. The ranks of a job check the job: start them with `horovodrun
-np N python -m tfposeidon check`, with `python -m tfposeidon run`, or on a platform that sets their
variables. With `--network FILE`, the command also measures the network between ranks and writes a
profile for `tfposeidon.init(network=FILE)`. If a check fails, the command prints the remedy and
exits with status 1.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfposeidon.commands import cuda, install, versions
from tfposeidon.commands.corrections import CORRECTED_MARK
from tfposeidon.commands.versions import InstallError
from tfposeidon.peers import rendezvous, sources
from tfposeidon.quiet import import_tensorflow
from tfposeidon.text import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks-per-node", type=int, help="ranks on each node, as for tfposeidon.init()"
    )
    parser.add_argument(
        "--network",
        metavar="FILE",
        help="measure the network between ranks, and write its profile to FILE",
    )


def main(options: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a check failed, else 0."""
    rows = [("python", f"{platform.python_version()} on {platform.machine()}")]
    try:
        rows += _versions()
        rows += peer_rows()
        # Import modules that need TensorFlow here and below, because `_versions` must first report
        # the remedy if TensorFlow is missing or unsupported.
        from tfposeidon.communication import launcher, runtime

        topology = runtime.init(ranks_per_node=options.ranks_per_node)
        ranks_here = launcher.ranks_of_node() or topology.node.size
        rows += [*horovod_build(ranks_here), ("topology", str(topology))]
        _require_averages()
        rows.append(("collective", f"averages are correct on all {topology.size} rank(s)"))
        if options.network:
            rows += _measured_links(topology, options.network)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        print(*table(rows), f"tfposeidon check: {error}", sep="\n", file=sys.stderr)
        return 1
    if topology.rank == 0:
        print("\n".join(table(rows)))
    return 0


def _versions() -> list[tuple[str, str]]:
    package = "tensorflow" if version_of("tensorflow") else "tensorflow-cpu"
    found = {}
    for name in ("tensorflow", "keras", "horovod", "numpy"):
        version = version_of(package if name == "tensorflow" else name)
        if version is None:
            raise InstallError(
                f"tfposeidon requires {name}, which is not installed. "
                "Run: python -m tfposeidon install"
            )
        found[name] = version
    versions.require_tensorflow(package, found["tensorflow"])
    built_for = install.built_for()
    if built_for and versions.release_of(built_for) != versions.release_of(found["tensorflow"]):
        raise InstallError(
            "The native library must be built for the TensorFlow that loads it. "
            f"Received: TensorFlow {found['tensorflow']} and a library for {built_for}. "
            "Run in tfposeidon's folder: pip install --force-reinstall --no-deps ."
        )
    if not found["keras"].startswith(install.KERAS_VERSION.rstrip("*")):
        raise InstallError(
            f"tfposeidon requires Keras {install.KERAS_VERSION}. Received: {found['keras']}. Run: "
            f"pip install 'keras=={install.KERAS_VERSION}'"
        )
    if not found["horovod"].endswith(CORRECTED_MARK):
        raise InstallError(
            f"Horovod requires patches to work over several hosts. Received: {found['horovod']} "
            "without patches. Run: python -m tfposeidon install --horovod-only"
        )
    return [*found.items()]


def version_of(name: str) -> str | None:
    """Returns the version of a distribution, or `None` if it is not installed."""
    return next((found.version for found in importlib.metadata.distributions(name=name)), None)


def peer_rows() -> Iterator[tuple[str, str]]:
    """Yields table rows about the platforms whose variables are set, and about the job's token."""
    # Import these modules here, for the reason that `main` states.
    import_tensorflow()
    from tfposeidon.communication import launcher

    found = "; ".join(map(str, sources.jobs(os.environ)))
    if rendezvous.has_launcher(os.environ, launcher.has_mpi()):
        name = next(name for name in launcher.RANK if os.environ.get(name))
        yield "job described by", f"a launcher, which has set {name}"
        if found:
            yield "other sources", found
    elif found:
        # Yield this row first: `main` must show it even if the token is invalid.
        yield "job described by", found
        secret = (
            f"requests carry a key from {sources.TOKEN}"
            if sources.token(os.environ)
            else "requests carry the job's identity, which separates jobs but is not secret"
        )
        yield "rendezvous", secret


def horovod_build(ranks_here: int) -> list[tuple[str, str]]:
    """Returns table rows about Horovod and GPUs; raises `InstallError` if NCCL is missing."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    built = [name for name in ("gloo", "mpi", "nccl", "cuda") if getattr(hvd, f"{name}_built")()]
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    gpus = len(tf.config.list_physical_devices("GPU"))
    if ranks_here <= gpus and "nccl" not in built:
        raise InstallError(
            "Horovod must be built with NCCL if each rank has its own GPU. Received: "
            f"{ranks_here} rank(s) and {gpus} GPU(s) on this node, and Horovod without NCCL. "
            "Run: python -m tfposeidon install --horovod-only --cuda"
        )
    return [
        ("horovod with", f"{', '.join(built)}; ranks connect over {controller}"),
        *gpu_rows(gpus),
    ]


def _require_averages() -> None:
    """Averages a vector with every scheme; raises `InstallError` on all ranks for a wrong mean."""
    import tensorflow as tf

    from tfposeidon.communication import runtime
    from tfposeidon.communication.wire import exchange_objects
    from tfposeidon.schemes import REGISTRY

    wire = runtime.wire()
    expected = (wire.topology.size - 1) / 2
    wrong = []
    for name, make in REGISTRY.items():
        exchange = tf.function(functools.partial(_exchanged, make(), wire, name), autograph=False)
        mean = exchange(tf.constant([float(wire.topology.rank)] * 5)).numpy()
        if abs(mean - expected).max() > 1e-3:
            wrong.append(f"{mean} by {name!r} on rank {wire.topology.rank}")
    of_ranks = exchange_objects(wrong, wire, "check.averages")
    if any(of_ranks):
        raise InstallError(
            f"All schemes must return {expected}, the mean of the ranks' numbers. Received: "
            f"{'; '.join(one for own in of_ranks for one in own)}. "
            "Reinstall Horovod: python -m tfposeidon install --horovod-only"
        )


def _exchanged(scheme: Any, wire: Any, name: str, vector: Any) -> Any:
    import tensorflow as tf

    # Flush, so that sparse schemes send all elements and their averages are exact.
    state = scheme.flushing(
        tuple(tf.zeros(slot.shape) for slot in scheme.slots(vector.shape[0], wire.topology))
    )
    return scheme.exchange(vector, state, wire, f"check.{name}")[0]


def _measured_links(topology: Any, path: str) -> list[tuple[str, str]]:
    """Measures the network between ranks, writes its profile on rank 0, and returns table rows."""
    if topology.size == 1:
        raise InstallError(
            "`--network` requires at least 2 ranks. Received: 1 rank. Run: horovodrun -np 2 "
            "python -m tfposeidon check --network FILE"
        )
    from tfposeidon.autotune import measurement
    from tfposeidon.communication import runtime

    links = measurement.measure(runtime.wire())
    if topology.rank == 0:
        # A rename is atomic, so readers find either the old or the new profile.
        part = Path(f"{path}.part")
        part.write_text(links.to_json())
        part.replace(path)
    return [("network", str(links)), ("profile", path)]


# ------------------------------------------------------------------ GPUs


def gpu_rows(gpus: int) -> list[tuple[str, str]]:
    """Returns table rows about `gpus` GPUs that TensorFlow has found; it must be loaded."""
    tensorflow_cuda, horovod_cuda = cuda.tensorflow_cuda(), _horovod_cuda()
    if not (gpus or cuda.driver_version() or horovod_cuda or tensorflow_cuda):
        return [("GPUs", "none, and no NVIDIA driver")]
    for what, version in (("Horovod", horovod_cuda), ("TensorFlow", tensorflow_cuda)):
        if gpus and version and (problem := cuda.problem_with_driver(version)):
            raise InstallError(f"{what} was built for CUDA {version}. {problem}")
    built_for = f"TensorFlow for {tensorflow_cuda or 'CPUs'}, Horovod for {horovod_cuda or 'CPUs'}"
    return [
        ("GPUs", _gpus(gpus, tensorflow_cuda)),
        ("NVIDIA driver", cuda.driver_text()),
        ("CUDA", built_for),
        ("NCCL", _nccl()),
        ("native ops", _native_ops(gpus)),
    ]


def _gpus(gpus: int, tensorflow_cuda: str | None) -> str:
    if gpus or cuda.driver_version() is None:
        return str(gpus)
    if tensorflow_cuda is None:
        return (
            "0 for TensorFlow, which is built for CPUs; python -m tfposeidon install --cuda prints "
            "the remedy"
        )
    if problem := cuda.problem_with_driver(tensorflow_cuda):
        return f"0 for TensorFlow. {problem}"
    # TensorFlow logs which libraries it did not find, but not at the log level that `quiet` sets.
    return (
        "0 for TensorFlow, although a driver is loaded. TF_CPP_MIN_LOG_LEVEL=0 python -c 'import "
        'tensorflow as tf; tf.config.list_physical_devices("GPU")\' logs the cause. Usually CUDA '
        "libraries are missing: pip install 'tensorflow[and-cuda]', in the installed version"
    )


def _horovod_cuda() -> str | None:
    """Returns the CUDA version in the metadata of Horovod's build, or `None` if it has none."""
    import horovod

    return json.loads(Path(horovod.__file__).with_name("metadata.json").read_text()).get("cuda")


def _nccl() -> str:
    import horovod.tensorflow as hvd

    if not (built := hvd.nccl_built()):
        return "none"
    number = ctypes.c_int()
    # Horovod has loaded this library.
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    # Version 2.27.7 has the number 22707.
    used, built_for = (
        f"{code // 10000}.{code % 10000 // 100}.{code % 100}" for code in (number.value, built)
    )
    # NVIDIA does not guarantee that an older NCCL works, but all tests passed with one on an H200.
    older = f"; if collectives fail: pip install 'nvidia-nccl-cu12>={built_for}'"
    return f"{used}, Horovod for {built_for}{older if built > number.value else ''}"


def _native_ops(gpus: int) -> str:
    import tensorflow as tf

    from tfposeidon import native, ops

    if not native.has_gpu_kernels():
        return (
            "on CPUs only, so TensorFlow copies GPU tensors to host memory. Install nvcc, then run "
            "in tfposeidon's folder: pip install --force-reinstall --no-deps ."
            if gpus
            else "on CPUs"
        )
    try:
        if gpus:
            with tf.device("/GPU:0"):
                ops.l2_norms([tf.ones([1])])
    except tf.errors.InternalError as error:
        raise InstallError(
            "The native ops must be compiled for the architecture of this GPU. Received: "
            f"{error.message}. In tfposeidon's folder, name the architecture in setup.cfg "
            "([build_ext] gpus=70 for a V100, 60 for a P100) and run: pip install "
            "--force-reinstall --no-deps . V100 and P100 need nvcc 12: set HOROVOD_CUDA_HOME to it."
        ) from error
    return "on CPUs and GPUs"
