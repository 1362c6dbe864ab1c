"""Reports versions, the build of Horovod and the nodes that it sees, and runs a small collective.

On its own it checks this machine; `horovodrun -np N python -m tfposeidon check` checks the job, as
do `python -m tfposeidon run` and the platforms whose variables it lists.
With `--network FILE` it also measures the network of the job, and writes a profile to a file for
`tfposeidon.init(network=FILE)`. If a check fails, it prints the remedy, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import platform
import sys
from typing import Any

from tfposeidon.commands import gpu_report, install, versions
from tfposeidon.commands.corrections import CORRECTED_MARK
from tfposeidon.peers import meeting, sources
from tfposeidon.quiet import import_tensorflow
from tfposeidon.text import table


class CheckError(RuntimeError):
    """Error of a failed check; the message names the remedy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m tfposeidon check`."""
    parser.add_argument(
        "--ranks-per-node", type=int, help="ranks on each node, as for tfposeidon.init()"
    )
    parser.add_argument(
        "--network",
        metavar="FILE",
        help="measure the network between ranks, and write its profile to FILE",
    )


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns 0, or 1 if a check fails."""
    try:
        rows = [*_versions(), *peers()]
        topology = _start(options.ranks_per_node)
        rows += [*horovod_build(_ranks_here(topology)), ("topology", str(topology))]
        problems = _problems_of_all()
        if options.network:
            rows += _measured_links(topology, options.network)
    except (CheckError, ImportError, OSError, ValueError, RuntimeError) as error:
        print(f"tfposeidon check: {error}", file=sys.stderr)
        return 1
    if topology.rank == 0:
        if not problems:
            rows.append(("collective", f"sums are right on all {topology.size} rank(s)"))
        print("\n".join([*table(rows), *problems]))
    return 1 if problems else 0


def _versions() -> list[tuple[str, str]]:
    rows = [("python", f"{platform.python_version()} on {platform.machine()}")]
    for names in (("tensorflow", "tensorflow-cpu"), ("keras",), ("horovod",), ("numpy",)):
        version = next((v for v in map(version_of, names) if v), None)
        if version is None:
            raise CheckError(f"{names[0]} is missing. Run: python -m tfposeidon install")
        rows.append((names[0], version))
    _check_tensorflow()
    keras = version_of("keras") or ""
    if not keras.startswith(install.KERAS_VERSION.rstrip("*")):
        raise CheckError(
            f"Keras {install.KERAS_VERSION} is needed. Received: {keras}. Run: pip install "
            f"'keras=={install.KERAS_VERSION}'"
        )
    if not (version_of("horovod") or "").endswith(CORRECTED_MARK):
        raise CheckError(
            "Horovod requires patches to work over several hosts. Received: "
            f"{version_of('horovod')} without patches. "
            "Run: python -m tfposeidon install --horovod-only"
        )
    return rows


def _check_tensorflow() -> None:
    package, version = next(
        (name, version)
        for name in ("tensorflow", "tensorflow-cpu")
        if (version := version_of(name)) is not None
    )
    versions.require_tensorflow(package, version)
    built_for = install.built_for()
    if built_for and versions.release_of(built_for) != versions.release_of(version):
        raise CheckError(
            "The native library must be built for the TensorFlow that loads it. "
            f"Received: TensorFlow {version} and a library for {built_for}. "
            "Run in tfposeidon's folder: pip install --force-reinstall --no-deps ."
        )


def version_of(name: str) -> str | None:
    """Returns the version of an installed distribution, or `None`."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def peers() -> list[tuple[str, str]]:
    """Returns rows about the platforms whose variables are set, and about the job's token."""
    # Imported here for the reason in `_start`.
    import_tensorflow()
    from tfposeidon.communication import launcher

    variables = meeting.variables()
    if meeting.has_launcher(variables, launcher.has_mpi()):
        name = next(name for name in launcher.RANK if variables.get(name))
        return [("peers by", f"a launcher, which has set {name}")]
    if not (found := sources.describe(variables)):
        return []
    secret = (
        f"requests bear a key from {sources.TOKEN}"
        if sources.token(variables)
        else "requests bear the job's identity, which keeps jobs apart but is not secret"
    )
    return [("peers by", "; ".join(found)), ("rendezvous", secret)]


def _start(ranks_per_node: int | None) -> Any:
    # Modules that need TensorFlow are imported here and below, because `_versions` first reports a
    # missing or unsupported TensorFlow with the remedy.
    import_tensorflow()
    from tfposeidon.communication import runtime

    return runtime.init(ranks_per_node=ranks_per_node)


def _ranks_here(topology: Any) -> int:
    from tfposeidon.communication import launcher

    return launcher.ranks_of_node() or len(topology.node.ranks)


def horovod_build(ranks_here: int) -> list[tuple[str, str]]:
    """Returns rows about Horovod and GPUs; requires NCCL if each rank has its own GPU."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    built = [name for name in ("gloo", "mpi", "nccl", "cuda") if getattr(hvd, f"{name}_built")()]
    controller = "MPI" if hvd.mpi_enabled() else "Gloo"
    gpus = len(tf.config.list_physical_devices("GPU"))
    if ranks_here <= gpus and "nccl" not in built:
        raise CheckError(
            "Horovod must be built with NCCL if each rank has its own GPU. Received: "
            f"{ranks_here} rank(s) and {gpus} GPU(s) on this node, and Horovod without NCCL. "
            "Run: python -m tfposeidon install --horovod-only --cuda"
        )
    return [
        ("horovod with", f"{', '.join(built)}; ranks connect over {controller}"),
        *gpu_report.rows(gpus),
    ]


def _problems_of_all() -> list[str]:
    """Returns the wrong sums of all ranks, each with its rank; collective."""
    from tfposeidon.communication import runtime
    from tfposeidon.communication.wire import exchange_objects

    ranks = exchange_objects(_wrong_schemes(), runtime.wire(), "check.problems")
    return [f"rank {rank}: {one}" for rank, own in enumerate(ranks) for one in own]


def _wrong_schemes() -> list[str]:
    """Runs every scheme once in a graph; returns a message for each with a wrong mean."""
    import tensorflow as tf

    from tfposeidon.communication import runtime
    from tfposeidon.schemes import REGISTRY

    wire = runtime.wire()
    topology = wire.topology
    expected = (topology.size - 1) / 2
    problems = []
    for name, make in REGISTRY.items():
        exchange = tf.function(functools.partial(_exchanged, make(), wire, name), autograph=False)
        mean = exchange(tf.constant([float(topology.rank)] * 5)).numpy()
        if abs(mean - expected).max() > 1e-3:
            problems.append(
                f"PROBLEM: scheme {name!r} returned {mean} instead of {expected}. "
                "Reinstall Horovod: python -m tfposeidon install --horovod-only"
            )
    return problems


def _exchanged(scheme: Any, wire: Any, name: str, vector: Any) -> Any:
    import tensorflow as tf

    # A flush sends everything, which makes sparse schemes exact.
    state = scheme.flushing(
        tuple(tf.zeros(slot.shape) for slot in scheme.slots(vector.shape[0], wire.topology))
    )
    return scheme.exchange(vector, state, wire, f"check.{name}")[0]


def _measured_links(topology: Any, path: str) -> list[tuple[str, str]]:
    """Measures the network between ranks; rank 0 writes its profile to a file."""
    if topology.size == 1:
        raise CheckError(
            "`--network` requires two ranks or more. Received: one rank. Run: horovodrun -np N "
            "python -m tfposeidon check --network FILE"
        )
    from tfposeidon.autotune import measurement
    from tfposeidon.communication import runtime

    links = measurement.measure(runtime.wire())
    if topology.rank == 0:
        _write_whole(path, links.to_json())
    rows = [
        (f"link {where}", _about_link(link))
        for where, link in (("within nodes", links.node), ("between nodes", links.across))
        if link is not None
    ]
    return [
        *rows,
        ("start of a collective", f"{1e3 * links.collective_s:.3g} ms"),
        ("compute of a rank", _about_rates(links.rates)),
        ("profile", f"{path}, {links.measured_at}; bandwidth uncertain by {links.uncertainty:.0%}"),
    ]


def _about_link(link: Any) -> str:
    from tfposeidon.communication.network_profile import readable_rate_of_payload as readable

    flow = link.flow_bytes_per_s
    limit = f", {readable(flow)} per connection" if flow else ""
    return f"{readable(link.bytes_per_s)}{limit}, {1e3 * link.latency_s:.3g} ms per message step"


def _about_rates(rates: Any) -> str:
    nanoseconds = {
        "add an element": rates.sum_s,
        "cast an element to 16 bits": rates.encode_s,
        "scan an element for selection": rates.select_s,
        "pack a pair of index and value": rates.pair_s,
    }
    parts = [f"{name}: {1e9 * seconds:.3g} ns" for name, seconds in nanoseconds.items()]
    return f"{', '.join(parts)}, with all ranks busy"


def _write_whole(path: str, text: str) -> None:
    """Writes a file atomically, by a rename: readers see the old or the new content."""
    beside = f"{path}.part"
    with open(beside, "w") as stream:
        stream.write(text)
    os.replace(beside, path)
