"""Starts the ranks of this machine, one per GPU, and ends all of them when one fails.

  python -m tfposeidon run -- python train.py                  # one rank per visible GPU
  python -m tfposeidon run --per-node 4 -- python train.py     # four ranks, also without GPUs
  python -m tfposeidon run --nodes 2 --node-rank 1 --master node1:29500 -- python train.py

For several nodes, run the command on each node, without SSH. Options or a platform's variables
describe the nodes (docs/clusters.md). Each rank sees one GPU, or all GPUs if ranks outnumber them.
The exit status is that of the first failed rank of this node, or 1 if only other nodes failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfposeidon.peers import rendezvous, sources, store
from tfposeidon.peers.rendezvous import Client
from tfposeidon.peers.runner import GRACE_S, Rank, Runner
from tfposeidon.peers.sources import Job

RANKS_OF_NODE = ("PET_NPROC_PER_NODE", "NPROC_PER_NODE")
"""Variables in which platforms set the number of ranks per node, or a word such as "gpu"."""
TERMINATION_S = 10.0
"""Time between SIGTERM and SIGKILL, during which ranks may save their state."""
FOLLOW_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--per-node",
        type=int,
        metavar="N",
        help="ranks on this machine (default: one per visible GPU; required without GPUs)",
    )
    nodes = parser.add_argument_group("several nodes (default: those of the platform's variables)")
    nodes.add_argument("--nodes", type=int, metavar="M", help="number of nodes")
    nodes.add_argument("--node-rank", type=int, metavar="I", help="index of this node, from 0")
    nodes.add_argument(
        "--master", metavar="HOST:PORT", help="address of node 0, with a free port on that node"
    )
    nodes.add_argument(
        "--token-file",
        metavar="FILE",
        help="file of mode 0600 with a secret that all nodes share (default: TFPOSEIDON_TOKEN)",
    )
    nodes.add_argument(
        "--start-timeout",
        type=float,
        default=rendezvous.START_TIMEOUT_S,
        metavar="SECONDS",
        help="time within which all nodes must register (default: %(default)g)",
    )
    parser.add_argument(
        "--output-folder",
        type=Path,
        metavar="FOLDER",
        help="write each rank's output to FOLDER/rank-N.log (default: print it with its rank)",
    )
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command of each rank"
    )


def main(options: argparse.Namespace) -> int:
    """Returns the job's exit status, or 2 if the options are invalid or the ranks could not run."""
    try:
        return _run(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"tfposeidon run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace) -> int:
    command = read_command(options.command_line)
    job = read_job(options, os.environ)
    token = read_token(options, os.environ, job)
    gpus = visible_gpus(os.environ)
    own = {"ranks": ranks_here(options.per_node, os.environ, gpus)}
    if options.output_folder:
        options.output_folder.mkdir(parents=True, exist_ok=True)
    client, server = rendezvous.open_store(job, token, options.start_timeout)
    with server.serving() if server else contextlib.nullcontext():
        deadline = time.monotonic() + options.start_timeout
        nodes = rendezvous.register_process(client, "nodes", job, own, deadline)
        counts = [node["ranks"] for node in nodes]
        ranks = [
            Rank(number, job.rank, command, environment)
            for number, environment in environments(job, token, client, counts, gpus)
        ]
        status = asyncio.run(run_ranks(ranks, client, options.output_folder))
        if server and job.size > 1:
            # Keep serving until all ranks have reported an exit status, because ranks of other
            # nodes may still read the cause of a failure.
            server.wait_for_exit_statuses(len(client.all(rendezvous.RANKS, 0) or ()))
    return status


def read_command(words: list[str]) -> list[str]:
    """Returns the command of each rank, without a leading `--`."""
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise ValueError(f"A command is required. Received: {words}. Append: -- python train.py")
    if not shutil.which(command[0]):
        raise ValueError(
            f"The command must be an executable file, or on PATH. Received: {command[0]!r}. Check "
            "its name, or pass its full path."
        )
    return command


def read_job(options: argparse.Namespace, variables: Mapping[str, str]) -> Job:
    """Returns the job that options or a platform describe, or else a job of this node only."""
    given = (options.nodes, options.node_rank, options.master)
    if given == (None, None, None):
        found = sources.find(variables)
        if found is None or found.size == 1:
            # The kernel chooses the port, because no other node needs to know it.
            identity = f"run {secrets.token_hex(8)}"
            return Job("the command line", 0, 1, "127.0.0.1", (0,), identity, unit="node")
        if not found.one_per_node:
            raise ValueError(
                "`run` starts all ranks of a node, so the platform must start one process per "
                f"node. Received from {found}, with several processes per node. Leave out `python "
                "-m tfposeidon run`: tfposeidon.init() finds the other ranks."
            )
        return dataclasses.replace(found, unit="node")
    nodes, node_rank, master = given
    if None in given:
        raise ValueError(
            "`--nodes`, `--node-rank` and `--master` must be given together. Received: --nodes "
            f"{nodes}, --node-rank {node_rank}, --master {master}. Omit all three for one node."
        )
    host, port = sources.split_address(master, "--master")
    identity = f"run {master} {nodes}"
    job = Job("the command line", node_rank, nodes, host, (port,), identity, unit="node")
    return sources.with_settings(job, {})


def read_token(options: argparse.Namespace, variables: Mapping[str, str], job: Job) -> str | None:
    """Returns the job's token: for a single node, the default is a random token."""
    if options.token_file:
        variables = {**variables, sources.TOKEN_FILE: options.token_file}
    return sources.token(variables) or (secrets.token_hex(16) if job.size == 1 else None)


def visible_gpus(variables: Mapping[str, str]) -> list[str]:
    """Returns the GPUs of this machine that CUDA may use, in the form of `CUDA_VISIBLE_DEVICES`."""
    if (given := variables.get(sources.VISIBLE_GPUS)) is not None:
        return [one.strip() for one in given.split(",") if one.strip() not in ("", "-1")]
    if not shutil.which("nvidia-smi"):
        return []
    # Do not ask TensorFlow, which would allocate memory on each GPU.
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return [str(index) for index in range(count)]


def ranks_here(asked: int | None, variables: Mapping[str, str], gpus: list[str]) -> int:
    by_platform = next((variables[name] for name in RANKS_OF_NODE if name in variables), "")
    if asked is None and by_platform.isdigit():
        asked = int(by_platform)
    count = len(gpus) if asked is None else asked
    if count < 1:
        raise ValueError(
            "`--per-node` must be at least 1, and is required without a GPU. Received: "
            f"--per-node {asked} and {len(gpus)} visible GPU(s). Pass the number of ranks of this "
            "machine, such as --per-node 2."
        )
    return count


def environments(
    job: Job, token: str | None, client: Client, counts: list[int], gpus: list[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the number and environment of each local rank; `counts` has the ranks per node."""
    place = (sum(counts), client.host, (client.port,), job.identity)
    first, count = sum(counts[: job.rank]), counts[job.rank]
    for index in range(count):
        own = Job("tfposeidon run", first + index, *place, node=f"node {job.rank}", has_store=True)
        # Ranks that share GPUs see all GPUs, which tfposeidon.init() counts and assigns.
        visible = {sources.VISIBLE_GPUS: gpus[index]} if count <= len(gpus) else {}
        # An empty variable counts as unset. Do not buffer output, so that `run` prints each line
        # immediately.
        common = {sources.TOKEN_FILE: "", rendezvous.MEMBER: "", "PYTHONUNBUFFERED": "1"}
        common |= {sources.TOKEN: token or "", sources.RUN: json.dumps(dataclasses.asdict(own))}
        yield own.rank, {**os.environ, **common, **visible}


class _Runner(Runner):
    """Runs the ranks of this node, and also ends them when a rank of another node has failed."""

    def __init__(self, client: Client, folder: Path | None) -> None:
        super().__init__("tfposeidon run", folder=folder, termination_s=TERMINATION_S)
        self._client = client
        self.failed_elsewhere = False

    async def follow(self) -> None:
        """Waits until a rank of any node has failed, and ends the ranks of this node."""
        cause = None
        while cause is None:
            try:
                place = (store.FAILURES, store.FIRST_FAILURE)
                cause = await asyncio.to_thread(self._client.get, *place, FOLLOW_S)
            except ConnectionRefusedError:
                # Node 0 has ended. The ranks detect its end themselves, or have ended, too.
                return
            except OSError:
                # A lost connection does not end the job.
                await asyncio.sleep(FOLLOW_S)
        # Set this before the grace period, in which the ranks of this node may end, even with
        # status 0.
        self.failed_elsewhere = True
        await asyncio.sleep(GRACE_S)
        if self.status == 0:
            self.say(f"the job ends. {cause}")
            self._task = None
            await self.end(0.0)

    def _fail(self, rank: Rank) -> None:
        status = None
        with contextlib.suppress(OSError):
            status = self._client.get(store.FAILURES, store.EXIT_STATUS.format(rank.number))
        # A rank that raised an exception after tfposeidon.init() has stored its own cause. After
        # sys.exit(3), a rank has stored "ended", as after a normal end.
        if status in (None, "ended"):
            self.leave_cause(f"{rank}.")
        super()._fail(rank)

    def leave_cause(self, cause: str) -> None:
        """Stores the cause of the job's end for the other nodes, unless the store has a cause."""
        # If the store has ended, no other node waits for the cause.
        with contextlib.suppress(OSError):
            self._client.put_first(store.FAILURES, store.FIRST_FAILURE, cause)


async def run_ranks(ranks: list[Rank], client: Client, folder: Path | None) -> int:
    """Runs the ranks; returns the exit status, which is 128 + number if a signal ended the job."""
    runner, here = _Runner(client, folder), f"run of node {ranks[0].node}"
    signals: list[int] = []

    def end(number: int) -> None:
        if signals:
            runner.signal(signal.SIGKILL)
        else:
            cause = f"{here} received {signal.Signals(number).name}."
            # Use another thread, because a request to a lost node 0 may block for seconds. An event
            # loop that is closing starts no threads.
            with contextlib.suppress(RuntimeError):
                loop.run_in_executor(None, runner.leave_cause, cause)
            runner.cancel()
        signals.append(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup, SIGHUP is ignored and must remain ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end, number)
    try:
        await runner.run(ranks, runner.follow)
    except OSError as error:
        runner.leave_cause(f"{here} failed: {error}.")
        raise
    except asyncio.CancelledError:
        if signals:
            return 128 + signals[0]
        runner.leave_cause(f"{here} could not write its output.")
        return 128 + signal.SIGPIPE
    return runner.status or int(runner.failed_elsewhere)
