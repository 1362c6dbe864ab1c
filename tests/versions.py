"""Runs tests and a job of two ranks on every supported pair of Python and TensorFlow.

Each pair has a separate environment, with TensorFlow and Horovod from
`python -m tfposeidon install`, and with tfposeidon from its sdist. The script runs
`python -m tfposeidon check`, some or all fast tests, and `examples/keras_digits.py` on two ranks.
Tests use the installed packages, not those of this folder.

A pair that ends in `-cuda` requires nvcc, and installs with `--cuda`: Horovod has NCCL, and the
native ops have GPU kernels. Such a pair trains on CPUs, and omits the fast tests.

Interpreters are found by name (`python3.12`), on the path or in pyenv's folder. Pairs without an
interpreter are skipped. Results are stored as JSON, and pairs that have passed do not run again.
The last output is a table in Markdown.

    make test-versions
    python -m tests.versions --pairs 3.13-2.21 3.12-2.19 --tests fast
    python -m tests.versions --pairs 3.12-2.21-cuda
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

from tests.launch import ROOT
from tfposeidon.commands import versions

PACKAGES = ("datacache", "keras_callbacks", "tfposeidon")
CORE = (
    "autotune",
    "commands",
    "communication",
    "datacache",
    "exchange",
    "factors",
    "gradients",
    "lab",
    "native",
    "optimizers",
    "schemes",
    "state",
    "test_optimizer.py",
    "test_readme.py",
    "training",
)
"""Folders of `--tests core`, which depend on TensorFlow, Keras, Horovod or the compiler."""
CUDA_PYTHON = "3.12"
"""Python release of all pairs with CUDA."""
LIMIT_S = 3600
TAIL_LINES = 15


class Pair:
    """A release of Python and a release of TensorFlow, with the folder of their environment.

    Args:
      name: `"3.12-2.20"`, or `"3.12-2.20-cuda"`.
      folder: Folder of all pairs.
    """

    def __init__(self, name, folder):
        self.name = name
        self.python, self.tensorflow, *rest = name.split("-")
        self.cuda = bool(rest)
        self.folder = folder / name
        self.environment = self.folder / "environment"
        self.source = self.folder / "source"
        self.tests = self.folder / "tests"

    def run(self, *command, cwd=None):
        """Runs `python command` in the environment, and appends its output to the log."""
        program = [str(self.environment / "bin" / "python"), *map(str, command)]
        return self.call(program, cwd or self.folder)

    def call(self, command, cwd):
        """Runs any command at low priority, and appends its output to the log.

        Raises:
          subprocess.CalledProcessError: If the command fails.
        """
        # Hide GPUs, because NCCL refuses two ranks on one GPU.
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.cuda else {}
        variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": "", **hidden}
        with (self.folder / "log").open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            subprocess.run(
                ["nice", "-n", "15", *command],
                cwd=cwd,
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
                check=True,
            )

    def last_lines(self):
        """Returns the last lines of the log."""
        return (self.folder / "log").read_text(errors="replace").splitlines()[-TAIL_LINES:]

    def installed(self):
        """Returns the versions of the main packages in the environment, by name."""
        code = (
            "import importlib.metadata as m, json, platform;"
            "names = ['tensorflow', 'tensorflow-cpu', 'keras', 'numpy', 'horovod'];"
            "found = {d.metadata['Name'].lower().replace('_', '-'): d.version"
            " for d in m.distributions()};"
            "print(json.dumps({'python': platform.python_version(),"
            "**{name: found[name] for name in names if name in found}}))"
        )
        program = [self.environment / "bin" / "python", "-c", code]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)


def interpreter(release):
    """Returns the path of a working `python<release>`, or `None`."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [shutil.which(f"python{release}")]
    candidates += sorted(pyenv.glob(f"versions/{release}.*/bin/python{release}"))
    for path in filter(None, candidates):
        # A shim of pyenv exists, but fails if its release is not selected.
        done = subprocess.run([path, "-c", "import venv"], capture_output=True)
        if done.returncode == 0:
            return str(path)
    return None


def make_environment(pair, options):
    """Creates an empty environment, and copies the files in this folder that git lists."""
    shutil.rmtree(pair.folder, ignore_errors=True)
    pair.folder.mkdir(parents=True)
    pair.call([interpreter(pair.python), "-m", "venv", str(pair.environment)], pair.folder)
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        # Skip files that were deleted without a commit.
        if (ROOT / name).exists():
            for home in [pair.source] + [pair.tests] * (name.split("/")[0] not in PACKAGES):
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, home / name)


def install(pair, options):
    """Installs TensorFlow, Keras and Horovod."""
    cuda = "--cuda" if pair.cuda else "--no-cuda"
    pair.run("-m", "tfposeidon", "install", cuda, "--tensorflow", pair.tensorflow, cwd=pair.source)


def package(pair, options):
    """Installs tfposeidon from its sdist."""
    # pip would install these tools into the isolated environment of a build.
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pair.run("-m", "pip", "--disable-pip-version-check", "install", "-q", *tools)
    build = "import build_backend; build_backend.build_sdist('../dist')"
    pair.run("-c", build, cwd=pair.source)
    with tarfile.open(next(pair.folder.glob("dist/*.tar.gz"))) as archive:
        archive.extractall(pair.folder / "sdist", filter="data")
    (unpacked,) = (pair.folder / "sdist").iterdir()
    pair.run("-m", "pip", "--disable-pip-version-check", "install", "-q", f"{unpacked}[test]")


def check(pair, options):
    """Runs `python -m tfposeidon check`; a pair with CUDA must have NCCL and GPU kernels."""
    pair.run("-m", "tfposeidon", "check")
    if pair.cuda:
        built = "import horovod.tensorflow as hvd; from tfposeidon import native; "
        pair.run("-c", f"{built} assert hvd.nccl_built() and native.has_gpu_kernels()")


def test(pair, options):
    """Runs the fast tests, or only those in the folders of `CORE`."""
    if pair.cuda:
        return
    places = ["tests"] if options.tests == "fast" else [f"tests/{place}" for place in CORE]
    pair.run("-m", "pytest", "-m", "fast", "-p", "no:cacheprovider", *places, cwd=pair.tests)


def job(pair, options):
    """Trains on two ranks; the script fails below an accuracy of 97 %."""
    programs = pair.environment / "bin"
    launcher = [str(programs / "horovodrun"), "--gloo", "-np", "2", str(programs / "python")]
    pair.call([*launcher, "examples/keras_digits.py"], pair.tests)


STEPS = {
    "environment": make_environment,
    "install": install,
    "sdist": package,
    "check": check,
    "tests": test,
    "2 ranks": job,
}


def run(pair, options):
    """Runs the steps of a pair until one fails.

    Returns:
      Versions, seconds of each step, and the failed step with the last lines of its log.
    """
    result = {"passed": False, "tests": options.tests, "seconds": {}}
    for name, step in STEPS.items():
        start = time.monotonic()
        try:
            step(pair, options)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            result |= {"failed": name, "error": str(error), "log": pair.last_lines()}
            break
        finally:
            result["seconds"][name] = round(time.monotonic() - start)
        if name == "install":
            result["versions"] = pair.installed()
    else:
        result |= {"passed": True, "versions": pair.installed(), "counts": _counts(pair)}
    if not options.keep:
        shutil.rmtree(pair.environment, ignore_errors=True)
    return result


def _counts(pair):
    lines = (pair.folder / "log").read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if " passed" in line), "")


def supported_pairs():
    """Returns the names of all pairs for which there are wheels, newest first."""
    pairs = [
        f"{python}-{tensorflow}"
        for python in reversed(versions.PYTHON)
        for tensorflow in reversed(versions.tensorflow_releases(python))
    ]
    return pairs + [f"{CUDA_PYTHON}-{release}-cuda" for release in reversed(versions.TENSORFLOW)]


def line(name, result):
    """Returns one line about a pair."""
    seconds = ", ".join(f"{step} {count} s" for step, count in result["seconds"].items())
    what = "passed" if result["passed"] else f"FAILED in {result['failed']}"
    return f"{name}: {what} ({seconds}) {result.get('counts', '')}"


def table(results):
    """Returns a Markdown table: a row for each TensorFlow, a column for each Python."""
    rows = [["", *(f"Python {python}" for python in versions.PYTHON), "CUDA and NCCL, on CPUs"]]
    rows += [["---"] * len(rows[0])]
    for tensorflow in versions.TENSORFLOW:
        cells = [_cell(results, python, tensorflow) for python in versions.PYTHON]
        cells.append(_cell(results, CUDA_PYTHON, tensorflow, "-cuda"))
        rows.append([f"TensorFlow {tensorflow}", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(results, python, tensorflow, cuda=""):
    if tensorflow not in versions.tensorflow_releases(python):
        return "no wheels"
    result = results.get(f"{python}-{tensorflow}{cuda}")
    if result is None:
        return "not run" if interpreter(python) else f"not run: no python{python}"
    if not result["passed"]:
        return f"failed: {result['failed']}"
    return f"passed, Keras {result['versions']['keras']}"


def main():
    """Runs the pairs that have not passed yet; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", nargs="+", choices=supported_pairs(), metavar="PYTHON-TENSORFLOW"
    )
    parser.add_argument("--tests", choices=["core", "fast"], default="core")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--again", action="store_true", help="repeat pairs that have passed")
    parser.add_argument("--keep", action="store_true", help="keep environments (2 GB each)")
    parser.add_argument("--table", action="store_true", help="show the results and run no pair")
    options = parser.parse_args()
    file = options.folder.resolve() / "results.json"
    for name in [] if options.table else options.pairs or supported_pairs():
        if _results(file).get(name, {}).get("passed") and not options.again:
            print(f"{name}: has passed")
            continue
        if interpreter(name.split("-")[0]) is None:
            print(f"{name}: skipped, as there is no python{name.split('-')[0]}")
            continue
        result = run(Pair(name, options.folder.resolve()), options)
        # Read the file again, because another process may have run other pairs meanwhile.
        file.write_text(json.dumps(_results(file) | {name: result}, indent=1))
        print(line(name, result), *result.get("log", []), sep="\n", flush=True)
    print(f"\n{table(_results(file))}")
    return any(not result["passed"] for result in _results(file).values())


def _results(file):
    return json.loads(file.read_text()) if file.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
