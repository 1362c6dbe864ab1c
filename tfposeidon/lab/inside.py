"""Part of the lab that runs inside private namespaces: `python -m tfposeidon.lab.inside`."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tfposeidon import quiet
from tfposeidon.lab import command, report
from tfposeidon.lab.cluster import Cluster
from tfposeidon.lab.network import INTERFACE, SWITCH_ADDRESS, host_name, network
from tfposeidon.lab.ranks import Job, say
from tfposeidon.lab.sandbox import ENDED, UnavailableError


def main(arguments: list[str]) -> int:
    """Builds the cluster, runs the job and reports; returns the job's exit status, or 2."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    # Ranks may write characters that this locale cannot encode, which must not end the job.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    return asyncio.run(_run(command.read_request(parser.parse_args(arguments))))


async def _run(request: command.Request) -> int:
    # Must come first, so that a request to end is not missed while the network is built.
    _cancel_at_end_of(sys.stdin.fileno())
    try:
        with network(request.cluster) as built, rendezvous(request.cluster) as environments:
            job = Job(built, request.faults, request.show)
            try:
                await job.run_on_nodes(request.command, environments)
            except asyncio.CancelledError:
                say("interrupted; ended all ranks")
                return ENDED
            # Read the counters inside the context: they disappear with the interfaces.
            found = report.Report.of(request.cluster, request.command, job, built.traffic())
    except subprocess.CalledProcessError as error:
        say(f"the kernel rejected a command: {' '.join(error.cmd)}\n  {error.stderr}")
        return 2
    except UnavailableError as error:
        say(str(error))
        return 2
    if request.report:
        found.write(request.report)
    print(found, file=sys.stderr)
    return job.status


def _cancel_at_end_of(descriptor: int) -> None:
    """Cancels the current task at the end of the descriptor, by which the sandbox ends a lab."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        loop.remove_reader(descriptor)
        task.cancel()

    loop.add_reader(descriptor, cancel)


@contextmanager
def rendezvous(cluster: Cluster) -> Iterator[list[dict[str, str]]]:
    """Runs Horovod's key-value store at the switch; yields the environment of each rank."""
    # These are internals of horovodrun, whose public interface reaches hosts by ssh only, not
    # network namespaces.
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    hosts = ",".join(f"{host_name(node)}:{cluster.per_node}" for node in range(cluster.nodes))
    slots = get_host_assignments(parse_hosts(hosts), cluster.size)
    server = RendezvousServer()
    store_port = server.start()
    server.init(slots)
    # User settings override our defaults, and Horovod's variables override both.
    common = (
        quiet.DEFAULTS
        | os.environ
        | create_run_env_vars(SWITCH_ADDRESS, [INTERFACE], str(store_port))
    )
    # Unbuffered, so that the lab shows lines as soon as ranks write them.
    common |= {"PYTHONUNBUFFERED": "1"}
    try:
        yield [common | create_slot_env_vars(slot) for slot in slots]
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
