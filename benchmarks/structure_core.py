"""Figures of the core, as `benchmarks.structure` prints them: rooms, imports, base class, Keras.

Imports count wherever they stand, also in functions and for types; `__init__` modules are passed
through. Rooms are the layers of the contract that import-linter checks. A private name of Keras is
an attribute with an underscore that this code reads or sets, that it does not define, and that
stands in Keras's source.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import keras

BASE, WRAPPER = "CommunicatingOptimizer", "OptimizerWrapper"
"""Base class of communicating optimizers, and the class that it extends; one class at first."""
REPLACED = """
import keras
import tfposeidon as tp
tp.DistributedOptimizer(keras.optimizers.SGD())
of = (*keras.Model.__mro__, keras.optimizers.LossScaleOptimizer)
print(sum(hasattr(value, "_tfposeidon") for one in of for value in vars(one).values()))
"""
"""Prints how many methods of Keras's classes an optimizer has replaced."""


def figures(root: Path) -> dict[str, object]:
    """Returns the figures of a tree, by their label."""
    package = root / "tfposeidon"
    sources = {name_of(path, root): path for path in sorted(package.rglob("*.py"))}
    imports = {name: imported(path, set(sources)) - {name} for name, path in sources.items()}
    trees = [ast.parse(path.read_text()) for path in package.rglob("*.py")]
    text = "\n".join(path.read_text() for path in package.rglob("*.py"))
    wrapper = methods_of(WRAPPER, trees)
    methods = methods_of(BASE, trees) or wrapper
    return {
        "modules of tfposeidon": len(sources),
        "layers of the import contract": rooms(root),
        "longest chain of imports": longest_chain(imports, sources),
        "methods of the optimizers' base class": len(methods),
        "of these abstract, constant or empty": sum(map(is_trivial, methods)),
        "methods of the wrapper that it extends": len(wrapper) if methods != wrapper else 0,
        "methods of Keras that are replaced": replaced(root),
        "private names of Keras": len(private_names(trees)),
        "sys._getframe, sys.last_value, except: pass": len(
            re.findall(
                r"sys\._getframe|sys, \"last_value|suppress\(Exception\)|sys\.last_value", text
            )
        ),
    }


def imported(path: Path, known: set[str]) -> set[str]:
    """Returns the modules that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def name_of(path: Path, root: Path) -> str:
    """Returns the name by which a module is imported."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def rooms(root: Path) -> int:
    """Returns the number of layers of the package's contract."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    return len(settings["contracts"][0]["layers"])


def longest_chain(imports: dict[str, set[str]], sources: dict[str, Path]) -> int:
    """Returns the number of modules of the longest chain of imports."""

    @cache
    def height(name: str) -> int:
        own = sources[name].name not in ("__init__.py", "__main__.py")
        # The packages in which a module lies lead back to it.
        below = {one for one in imports[name] if not name.startswith(f"{one}.")}
        return own + max(map(height, below), default=0)

    return max(map(height, imports))


def methods_of(name: str, trees: list[ast.Module]) -> list[ast.FunctionDef]:
    """Returns the methods and properties of a class, none if there is no such class."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    found = [node.body for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]
    return [node for body in found for node in body if isinstance(node, ast.FunctionDef)]


def is_trivial(method: ast.FunctionDef) -> bool:
    """Returns whether a method raises, does nothing, or returns a constant."""
    body = [node for node in method.body if not _is_docstring(node)]
    if len(body) > 1:
        return False
    return not body or isinstance(body[0], ast.Raise | ast.Pass) or _returns_constant(body[0])


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _returns_constant(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Return) or node.value is None:
        return False
    calls_nothing = isinstance(node.value, ast.Call) and not node.value.args
    is_empty = isinstance(node.value, ast.Dict | ast.List | ast.Tuple) and not ast.unparse(
        node.value
    ).strip("{}[]()")
    return isinstance(node.value, ast.Constant) or is_empty or (calls_nothing and _is_class(node))


def _is_class(node: ast.Return) -> bool:
    assert isinstance(node.value, ast.Call)
    name = ast.unparse(node.value.func).rpartition(".")[2]
    return name[:1].isupper() or name == "nullcontext"


def replaced(root: Path) -> str:
    """Returns how many methods of Keras a tree replaces, as a process of its own counts them."""
    done = subprocess.run(
        [sys.executable, "-c", REPLACED], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.split()[-1]


def private_names(trees: list[ast.Module]) -> set[str]:
    """Returns the private names of Keras that a package uses."""
    used, defined = set(), set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                (defined if own and isinstance(node.ctx, ast.Store) else used).add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
    return {name for name in used - defined if name in words_of_keras()}


@cache
def words_of_keras() -> frozenset[str]:
    """Returns the private words in Keras's source."""
    return frozenset(_words(Path(keras.__file__).parent))


def _words(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        yield from re.findall(r"\b_[a-z]\w*", path.read_text(errors="ignore"))
