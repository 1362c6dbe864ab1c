"""Provides the shared code of the benchmarks: options, jobs in the lab, stored results, tables."""

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tfposeidon.text import table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
SMALLEST_RESULTS = ROOT / "build" / "smallest"
PACKAGES = ("tensorflow-cpu", "tensorflow", "keras", "horovod", "torch", "numpy")


# The flags with which setup.py compiles the library.
NATIVE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-Wno-psabi",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-pthread",
    "-I.",
)
NVCC = ("nvcc", "-std=c++17", "-O3", "--fmad=false", "-arch=native", "-I.")
TIME_LIMIT_S = 3600
# Name of another framework up to the first dash -> its worker.
PEER_WORKERS = {"ddp": "ddp", "mirrored": "mirrored", "jax": "jax_fit"}
# JAX has a separate environment, because it needs another backend of Keras and another NumPy.
JAX = ROOT / "build" / "jax" / "bin" / "python"
JAX_REMEDY = (
    "python -m venv build/jax && build/jax/bin/pip install keras==3.15.1 jax==0.10.2 "
    "typing_extensions"
)
INTERPRETERS = {"jax_fit": str(JAX)}
"""Python of workers that need a different environment."""


class JobError(Exception):
    """Error of a job that failed.

    Attributes:
      partial: Measurements before the failure, as `in_lab` returns them, or `None`.
      answer: Measurements to store in spite of the failure, set by benchmarks whose jobs can
        resume, or `None`.
    """

    def __init__(self, message, partial=None):
        super().__init__(message)
        self.partial, self.answer = partial, None


class Results:
    """Answers of a benchmark by key, stored in a JSON file after each job.

    An interrupted benchmark resumes with the missing answers.

    Attributes:
      path: File of the answers.
      cells: Key -> answer.

    Args:
      path: File to continue; its folder is created if it is missing.
      fresh: True to overwrite the file.
    """

    def __init__(self, path, fresh=False):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.cells = json.loads(self.path.read_text()) if self.path.exists() and not fresh else {}

    def __contains__(self, key):
        return key in self.cells

    def add(self, key, answer):
        """Stores an answer, with its machine and commit.

        The file is renamed when it is complete: an interruption leaves the old or the new file.

        Args:
          key: Key of the job.
          answer: Measurements of the job, for JSON.
        """
        self.cells[key] = answer | {"machine": machine()}
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.cells, indent=1) + "\n")
        beside.replace(self.path)


def argument_parser(name, description):
    """Returns a parser with the options that every benchmark accepts.

    Args:
      name: Name of the benchmark's module, and of its file of results.
      description: Text that `--help` prints above the options.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(benchmark=name)
    parser.add_argument(
        "--results",
        type=Path,
        help=f"JSON file to continue (docs/results/{name}.json; "
        f"with --smallest build/smallest/{name}.json)",
    )
    parser.add_argument("--fresh", action="store_true", help="discard the file first")
    parser.add_argument(
        "--full",
        action="store_true",
        help="measure everything, in minutes to hours; by default a short version",
    )
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="measure one small case of each kind, as a quick test",
    )
    return parser


def keyed(arguments):
    """Returns jobs by a key that contains all their arguments.

    Args:
      arguments: Arguments of each job, by name.
    """
    return {" ".join(f"{name}={value}" for name, value in one.items()): one for one in arguments}


def by_worker(systems, ours):
    """Returns the systems that each worker measures; other frameworks have separate workers.

    Args:
      systems: Names of schemes and other frameworks.
      ours: Worker of all schemes.
    """
    found = {}
    for system in systems:
        found.setdefault(PEER_WORKERS.get(system.partition("-")[0], ours), []).append(system)
    return found


def parse(parser, short, full, smallest, others=None):
    """Parses the command line, and adds the values of a version for omitted options.

    Args:
      parser: Parser from `argument_parser`.
      short: Values by option, if no flag selects a version.
      full: Values with `--full`.
      smallest: Values with `--smallest`.
      others: Values by the flag of a version that only this benchmark has.

    Returns:
      The options; `results` is the file to continue.
    """
    options = parser.parse_args()
    if options.results is None:
        # The smallest version only checks that a benchmark runs.
        options.results = (
            SMALLEST_RESULTS if options.smallest else RESULTS
        ) / f"{options.benchmark}.json"
    # Apply the smallest version last, because it overrides the values of every other version.
    found = {"full": full} | (others or {}) | {"smallest": smallest}
    versions = [values for flag, values in found.items() if getattr(options, flag)]
    for name, values in (versions[-1] if versions else short).items():
        if not getattr(options, name, None):
            setattr(options, name, values)
    return options


def carry_out(options, planned, run, show, plot):
    """Runs the missing jobs, then prints and plots all answers in the file.

    Args:
      options: Options from `parse`.
      planned: Key -> arguments of `run`, or a function from the results so far to such a mapping.
      run: Function that measures one job and returns its answer.
      show: Function that prints tables of all answers.
      plot: Function that plots all answers, and saves the plot under a path.

    Raises:
      SystemExit: With status 1, if a job failed.
    """
    results = Results(options.results, options.fresh)
    planned = planned(results) if callable(planned) else planned
    failed = jobs(results, planned, run)
    if results.cells:
        show(results.cells)
        plot(results.cells, options.results.with_suffix(".png"))
    if failed:
        sys.exit(
            f"{len(failed)} of {len(planned)} jobs failed: {', '.join(failed)}. "
            "Run the command again to continue."
        )


def jobs(results, planned, run):
    """Runs the jobs that the results lack, and shows progress.

    Args:
      results: The `Results` to continue.
      planned: Key -> arguments of `run`.
      run: Function that measures one job and returns its answer.

    Returns:
      Keys of the jobs that failed.
    """
    failed = []
    missing = {key: arguments for key, arguments in planned.items() if key not in results}
    print(f"{len(planned) - len(missing)} of {len(planned)} jobs are in {results.path}", flush=True)
    for number, (key, arguments) in enumerate(missing.items(), 1):
        begin = time.monotonic()
        print(f"\n[{number}/{len(missing)}] {key}", flush=True)
        try:
            results.add(key, run(**arguments))
        except JobError as error:
            failed.append(key)
            if error.answer:
                results.add(key, error.answer)
            print(f"    failed; the next run repeats it: {error}", flush=True)
        print(f"    {time.monotonic() - begin:.0f} s", flush=True)
    return failed


def cluster(layout, rate):
    """Returns the lab's options for a cluster.

    Args:
      layout: "MxN": nodes x ranks per node.
      rate: Bandwidth between nodes, such as "200mbit", or "unshaped".
    """
    nodes, per_node = layout.split("x")
    return f"--nodes {nodes} --per-node {per_node}" + (
        "" if rate == "unshaped" else f" --inter {rate}"
    )


def in_lab(options, worker, task):
    """Runs `benchmarks.workers.<worker>` on the ranks of an emulated cluster.

    Args:
      options: Options of `python -m tfposeidon lab`, as one string.
      worker: Name of the worker's module.
      task: Request to the worker, for JSON.

    Returns:
      The worker's answer (system -> measurements), the request, dropped packets and seconds.

    Raises:
      JobError: If the job fails, or takes longer than an hour.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer, report = Path(folder) / "answer.json", Path(folder) / "report.json"
        lab = [
            "-m",
            "tfposeidon",
            "lab",
            *options.split(),
            "--show",
            "first",
            "--report",
            str(report),
            "--",
        ]
        request = json.dumps(task | {"result": str(answer)})
        # If this process is killed, the job ends, too.
        command = [
            "setpriv",
            "--pdeathsig",
            "TERM",
            sys.executable,
            *lab,
            INTERPRETERS.get(worker, sys.executable),
            "-m",
            f"benchmarks.workers.{worker}",
            request,
        ]
        keywords = {
            "cwd": ROOT,
            "env": environment(),
            "stderr": subprocess.PIPE,
            "text": True,
            "timeout": TIME_LIMIT_S,
        }
        try:
            done = subprocess.run(command, **keywords)
        except subprocess.TimeoutExpired as error:
            raise JobError(str(error), _answer(answer, report, options, task, worker)) from error
        found = _answer(answer, report, options, task, worker)
        if done.returncode:
            raise JobError(
                f"{shlex.join(command)} exited with {done.returncode}:\n{done.stderr[-4000:]}",
                found,
            )
        return found


def environment():
    """Returns the environment of jobs, with this folder's packages and without warnings."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}


def _answer(answer, report, options, task, worker):
    """Returns a job's measurements and the lab's report, or `None` without measurements."""
    if not answer.exists():
        return None
    # A killed lab writes no report.
    reported = json.loads(report.read_text()) if report.exists() else {"traffic": []}
    return {
        "systems": json.loads(answer.read_text()),
        "options": options,
        "task": task,
        "worker": worker,
        "dropped_packets": sum(link["dropped_packets"] for link in reported["traffic"]),
        "wall_s": reported.get("wall_s"),
    }


def native(name, *arguments, more=(), cuda=False):
    """Compiles `benchmarks/native/<name>.cc` with the native library, and runs it.

    Args:
      name: Name of the source, without its suffix.
      *arguments: Arguments of the program.
      more: NumPy arrays, whose files follow the arguments.
      cuda: True to link the library for the GPU of this machine as well.

    Returns:
      The measurements that the program printed, parsed from JSON.
    """
    program = _compiled(name, cuda)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"values{index}" for index in range(len(more))]
        for file, values in zip(files, more, strict=True):
            values.tofile(file)
        command = [program, *map(str, arguments), *files]
        return json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )


@functools.cache
def _compiled(name, cuda):
    """Compiles a program once, and returns its path."""
    program = ROOT / "build" / "benchmarks" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    sources = [
        f"benchmarks/native/{name}.cc",
        *sorted((ROOT / "tfposeidon/native/lib").glob("*.cc")),
    ]
    compiler = ["g++", *NATIVE_FLAGS]
    if cuda:
        compiler = [*NVCC, "-Xcompiler=" + ",".join(NATIVE_FLAGS[2:-1])]
        sources.append("tfposeidon/native/lib/gpu/gpu.cu")
    subprocess.run([*compiler, *sources, "-o", program], cwd=ROOT, check=True)
    return program


def emulated(cells):
    """Returns the heading of results that were measured with emulated accelerators."""
    processors = [cell["machine"]["processor"] for cell in cells.values() if "machine" in cell]
    cores = {processor.partition(" x ")[0] for processor in processors}
    where = f" on a {' or '.join(sorted(cores))}-core machine" if cores else ""
    return f"emulated{where}".replace(" 2-core", " two-core")


def machine():
    """Returns commit, CPU, kernel and versions of packages, for each stored answer."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT
    )
    return {
        "commit": git.stdout.strip() or "unknown",
        "processor": f"{len(names)} x {names[0]}" if names else platform.machine(),
        "kernel": platform.release(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def show(rows):
    """Prints a table.

    Args:
      rows: Texts of the cells; the first row is the header.
    """
    print("\n".join(table(rows)), flush=True)
