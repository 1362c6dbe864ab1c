"""Injects faults into the code, one at a time, and runs tests that cover the changed line.

    python -m tests.mutants cover                 # runs all tests under coverage
    python -m tests.mutants cover --tests "fast or slow or ranks"   # without jobs
    python -m tests.mutants run --seed 37 --count 40
    python -m tests.mutants show

A mutant negates a comparison, changes a constant, omits a call or swaps branches, in code that
exchanges, plans, averages, restores or caches. It runs in a copy of the tree. A test that fails or
exceeds the time limit detects ("kills") the mutant. Results are in build/mutants.json; an
interrupted run resumes. Requires `pip install coverage`.
"""

import argparse
import ast
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests import launch
from tests.launch import ROOT

CODE = (
    *("exchange", "communication", "schemes", "sharded", "local", "elastic_averaging"),
    *("factors", "autotune", "state", "gradients", "policies", "training", "optimizers", "checks"),
)
"""Folders or modules of tfposeidon; keras_callbacks and datacache are included as a whole."""
DATA = ROOT / "build" / "mutants.coverage"
RESULTS = ROOT / "build" / "mutants.json"
LIMIT_S = 60
MOST_TESTS = 8
"""Number of tests that run for a line: those that cover the fewest lines, and if they detect
nothing, as many others, drawn at random."""
TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
SETTINGS = """
[run]
branch = true
parallel = true
patch = subprocess
dynamic_context = test_function
data_file = {data}
source = tfposeidon, keras_callbacks, datacache
"""


def sources():
    """Yields the files that mutants change."""
    folders = [ROOT / "tfposeidon" / name for name in CODE]
    folders += [ROOT / "keras_callbacks", ROOT / "datacache"]
    for folder in folders:
        yield from sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


class Mutant:
    """A change of one file, which replaces the text between two positions."""

    def __init__(self, kind, path, node, text):
        self.kind, self.text = kind, text
        self.path = str(path.relative_to(ROOT))
        self.line = node.lineno
        self._begin, self._end = (
            (node.lineno, node.col_offset),
            (node.end_lineno, node.end_col_offset),
        )

    def __str__(self):
        return f"{self.path}:{self.line}:{self._begin[1]} {self.kind}: {self.text}"

    def put_into(self, root):
        """Applies the change to a copy of the tree."""
        path = root / self.path
        lines = path.read_text().splitlines(keepends=True)
        (first, left), (last, right) = self._begin, self._end
        head, tail = lines[first - 1].encode()[:left], lines[last - 1].encode()[right:]
        lines[first - 1 : last] = [(head + self.text.encode() + tail).decode()]
        path.write_text("".join(lines))


def mutants_of(path):
    """Yields all mutants of a file."""
    tree = ast.parse(path.read_text())
    # Python 3.11 reports wrong positions for the parts of f-strings.
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    within = {part for string in strings for part in ast.walk(string)}
    for node in ast.walk(tree):
        if node in within:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield Mutant("comparison", path, node, f"({left} {TURNED[type(node.ops[0])]} {right})")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield Mutant("constant", path, node, repr(node.value + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield Mutant("constant", path, node, repr(not node.value))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield Mutant("call left out", path, node, "pass")
        elif isinstance(node, ast.If | ast.IfExp):
            yield Mutant("branch", path, node.test, f"(not ({ast.unparse(node.test)}))")


def chosen(seed, count, lines):
    """Draws equally many mutants of each kind from lines that tests cover."""
    found = {}
    for path in sources():
        for mutant in mutants_of(path):
            if (mutant.path, mutant.line) in lines:
                found.setdefault(mutant.kind, []).append(mutant)
    draw = random.Random(seed)
    return [m for kind in sorted(found) for m in draw.sample(found[kind], count // len(found))]


def covered():
    """Maps (file, line) to the tests that execute it, those with the fewest lines first."""
    import coverage

    data = coverage.CoverageData(str(DATA))
    data.read()
    lines, sizes = {}, {}
    for file in data.measured_files():
        path = str(Path(file).relative_to(ROOT))
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = {
                context for context in contexts if "test_" in context and ".samples." not in context
            }
            for test in tests:
                sizes[test] = sizes.get(test, 0) + 1
            if tests:
                lines[path, line] = tests
    return {at: sorted(tests, key=lambda test: (sizes[test], test)) for at, tests in lines.items()}


def node_id(context):
    """Converts `tests.schemes.test_ops.Class.test_name` to pytest's form."""
    words = context.split(".")
    module = next(
        n
        for n in range(len(words), 0, -1)
        if (ROOT / "/".join(words[:n])).with_suffix(".py").exists()
    )
    return "::".join([f"{'/'.join(words[:module])}.py", *words[module:]])


def cover(options):
    """Runs tests with coverage on all ranks, and combines the data."""
    DATA.parent.mkdir(exist_ok=True)
    settings = DATA.with_suffix(".ini")
    settings.write_text(SETTINGS.format(data=DATA))
    command = [sys.executable, "-m", "coverage"]
    run = [*command, "run", f"--rcfile={settings}", "-m", "pytest", "-p", "no:cacheprovider"]
    subprocess.run([*run, *(["-m", options.tests] if options.tests else [])], cwd=ROOT)
    subprocess.run([*command, "combine", f"--rcfile={settings}"], cwd=ROOT, check=True)
    subprocess.run([*command, "report", f"--rcfile={settings}", "--skip-covered"], cwd=ROOT)


def tried(mutant, tests):
    """Applies a mutant to a copy of the tree, and returns the outcome of the tests of its line."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.egg-info")
        shutil.copytree(ROOT, root, ignore=ignored)
        before = (root / mutant.path).read_text()
        while True:
            mutant.put_into(root)
            outcome = _outcome(root, tests)
            if outcome != LATE:
                return outcome
            # A timeout counts only if the same tests end without the mutant.
            (root / mutant.path).write_text(before)
            if _outcome(root, tests) == SURVIVED:
                return outcome
            if len(tests) == 1:
                return f"not judged: {tests[0]} takes more than {LIMIT_S} s"
            tests = tests[: len(tests) // 2]


SURVIVED = "survived"
LATE = f"killed: the tests did not end within {LIMIT_S} s"


def _outcome(root, tests):
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # The copy on the path takes precedence over the installed package.
    process = launch.start(command, {"PYTHONPATH": str(root)}, cwd=root)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # On SIGTERM, the session also ends its jobs.
        try:
            process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            launch.kill(process)
            process.communicate()
        return LATE
    if process.returncode == 0:
        return SURVIVED
    if process.returncode in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest did not find {tests}:\n{output[-2000:]}")
    last = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    return f"killed: {last[-1][:150] if last else f'exit code {process.returncode}'}"


def run(options):
    """Runs the tests of the mutants that have no result yet."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    lines = covered()
    for mutant in chosen(options.seed, options.count, lines):
        if str(mutant) in results:
            continue
        every = [node_id(test) for test in lines[mutant.path, mutant.line]]
        tests, others = every[:MOST_TESTS], every[MOST_TESTS:]
        outcome = tried(mutant, tests)
        if outcome == SURVIVED and others:
            draw = random.Random(str(mutant))
            tests = draw.sample(others, min(len(others), MOST_TESTS))
            outcome = tried(mutant, tests)
        results[str(mutant)] = {"outcome": outcome, "tests": tests}
        RESULTS.write_text(json.dumps(results, indent=1))
        print(f"{mutant}\n    {outcome}", flush=True)


def show(_):
    """Prints how many mutants were killed, and the names of the others."""
    results = json.loads(RESULTS.read_text())
    survivors = [name for name, found in results.items() if found["outcome"] == SURVIVED]
    print(f"{len(results) - len(survivors)} of {len(results)} killed", *survivors, sep="\n  ")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("cover", "run", "show"))
    parser.add_argument("--seed", type=int, default=37, help="seed of the choice of mutants (37)")
    parser.add_argument("--count", type=int, default=40, help="number of mutants (40)")
    parser.add_argument("--tests", metavar="MARKERS", help="tests that `cover` runs (all)")
    options = parser.parse_args()
    {"cover": cover, "run": run, "show": show}[options.what](options)


if __name__ == "__main__":
    main()
