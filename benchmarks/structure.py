"""Prints figures of the code: folders, files, complexity, members, docstrings, README.

    python -m benchmarks.structure v0.1 HEAD     # a table with one column per revision
    python -m benchmarks.structure --missing     # public functions that lack `Args` or `Returns`

A function is public when neither its name nor that of its class begins with an underscore. Its
`Args` are complete when the section names every parameter, and functions without parameters are
not counted; for a class with a constructor of its own, the section may be that of the class. Its
`Returns` are complete when it has such a section or `Yields`, or when its summary begins with that
word; functions annotated to return None are not counted, nor contexts that yield None. Neither are
properties, and methods marked `@override`, whose contract stands at the base class.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import structure_core
from tfposeidon.text import table

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tfposeidon", "datacache", "keras_callbacks")
COMPLEXITY = 10
NOT_COUNTED = {"property", "override", "overload", "cached_property", "setter"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revisions", nargs="*", help="git revisions; none is the working tree")
    parser.add_argument(
        "--missing", action="store_true", help="list public functions without Args or Returns"
    )
    options = parser.parse_args()
    if options.missing:
        print(*missing(ROOT), sep="\n")
        return
    columns = [figures_at(revision) for revision in options.revisions] or [figures(ROOT)]
    rows = [[name, *(str(column[name]) for column in columns)] for name in columns[0]]
    print(*table([["", *(options.revisions or ["working tree"])], *rows]), sep="\n")


def figures_at(revision: str) -> dict[str, object]:
    """Returns the figures of a revision, read from an archive of it."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return figures(Path(folder))


def figures(root: Path) -> dict[str, object]:
    """Returns the figures of a tree, by their label."""
    sources = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    functions = [entry for path in sources for entry in public_functions(path)]
    taking = [entry for entry in functions if parameters(entry[0])]
    returning = [function for function, _ in functions if returns(function)]
    modules = Counter(path.parent for path in sources if path.name != "__init__.py")
    return {
        **{
            f"modules in the top folder of {package}": modules[root / package]
            for package in PACKAGES
        },
        "folders with modules": len(modules),
        "modules in a folder, median": statistics.median_high(modules.values()),
        "modules in the largest flat folder": max(modules.values()),
        "lines of the largest file": max(len(path.read_text().splitlines()) for path in sources),
        f"functions over complexity {COMPLEXITY}": complex_functions(root),
        "lines over 100 columns": sum(
            len(line) > 100 for path in sources for line in path.read_text().splitlines()
        ),
        "comment lines per 100 lines of code": f"{comments(sources):.1f}",
        "public members of DistributedOptimizer": members(root, "DistributedOptimizer"),
        "public functions with complete Args": percent(complete_args(*entry) for entry in taking),
        "public functions with complete Returns": percent(map(complete_returns, returning)),
        "words of the README": len((root / "README.md").read_text().split()),
        **{
            f"lines of {package}": sum(map(lines, of_package(root, package)))
            for package in PACKAGES
        },
        **{
            f"statements of {package}": sum(map(statements, of_package(root, package)))
            for package in PACKAGES
        },
        **structure_core.figures(root),
    }


def of_package(root: Path, package: str) -> list[Path]:
    """Returns the modules of a package."""
    return sorted((root / package).rglob("*.py"))


def lines(path: Path) -> int:
    """Returns the number of lines of a module."""
    return len(path.read_text().splitlines())


def statements(path: Path) -> int:
    """Returns the number of statements of a module, without docstrings."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in found
    )


def percent(complete: Iterable[bool]) -> str:
    """Returns the share of what is complete."""
    found = list(complete)
    return f"{100 * sum(found) / len(found):.0f} %"


def public_functions(path: Path) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yields public functions, each with the docstring of its class."""

    def visit(body: list[ast.stmt], of_class: str) -> Iterator[tuple[ast.FunctionDef, str]]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from visit(node.body, ast.get_docstring(node) or "")
            elif isinstance(node, ast.FunctionDef):
                public = not node.name.startswith("_") or node.name == "__init__"
                if public and not NOT_COUNTED & set(map(decorator_name, node.decorator_list)):
                    yield node, of_class

    return visit(ast.parse(path.read_text()).body, "")


def decorator_name(decorator: ast.expr) -> str:
    """Returns the last part of a decorator's name."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def parameters(function: ast.FunctionDef) -> list[str]:
    """Returns the names of what a caller passes."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star]
    return [
        argument.arg
        for argument in (*named, *stars)
        if argument.arg not in ("self", "cls") and not argument.arg.startswith("_")
    ]


def complete_args(function: ast.FunctionDef, of_class: str) -> bool:
    """Returns whether the docstring's `Args` name every parameter."""
    documented = ast.get_docstring(function) or ""
    if function.name == "__init__":
        documented += "\n" + of_class
    section = re.search(r"^(?:Args|Attributes):\n((?:(?:[ \t].*)?\n?)*)", documented, re.MULTILINE)
    names = re.findall(r"^\s+`?\*{0,2}(\w+)`?\s*[:(,]", section[1], re.MULTILINE) if section else []
    return set(parameters(function)) <= set(names)


def returns(function: ast.FunctionDef) -> bool:
    """Returns whether a function is annotated to return or yield something."""
    annotation = ast.unparse(function.returns) if function.returns else "None"
    return annotation not in ("None", "Iterator[None]") and function.name != "__init__"


def complete_returns(function: ast.FunctionDef) -> bool:
    """Returns whether the docstring says what the function returns or yields."""
    documented = ast.get_docstring(function) or ""
    return bool(re.search(r"\A(Returns|Yields) |^(Returns|Yields):$", documented, re.MULTILINE))


def complex_functions(root: Path) -> int:
    """Counts functions over the complexity, as ruff sees them."""
    # Isolated, so that all revisions are measured alike, whatever their own settings say.
    found = subprocess.run(
        [
            *(sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901"),
            *("--config", f"lint.mccabe.max-complexity={COMPLEXITY}", "--output-format=concise"),
            *(str(root / package) for package in PACKAGES),
        ],
        capture_output=True,
        text=True,
    )
    return found.stdout.count("C901")


def comments(sources: list[Path]) -> float:
    """Returns lines of comment per hundred lines of code that are neither comment nor empty."""
    lines = [line.strip() for path in sources for line in path.read_text().splitlines()]
    commented = sum(line.startswith("#") for line in lines)
    return 100 * commented / sum(bool(line) and not line.startswith("#") for line in lines)


def members(root: Path, name: str) -> int:
    """Counts public methods and properties that a class of `tfposeidon/optimizer.py` defines."""
    tree = ast.parse((root / "tfposeidon/optimizer.py").read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return sum(
        isinstance(node, ast.FunctionDef) and not node.name.startswith("_") for node in found.body
    )


def missing(root: Path) -> Iterator[str]:
    """Yields where public functions lack `Args` or `Returns`, as `path:line: name: what`."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for function, of_class in public_functions(path):
                where = f"{path.relative_to(root)}:{function.lineno}: {function.name}"
                if not complete_args(function, of_class):
                    yield f"{where}: Args"
                if returns(function) and not complete_returns(function):
                    yield f"{where}: Returns"


if __name__ == "__main__":
    main()
