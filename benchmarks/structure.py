"""Prints code metrics and their limits: size, imports, documentation, uses of Keras.

    python -m benchmarks.structure               # the working tree; `make check` prints this
    python -m benchmarks.structure v0.1 HEAD     # a column per revision
    python -m benchmarks.structure --missing     # names of docs/api.md without complete docstrings
    python -m benchmarks.structure --folders 51a1002 HEAD    # lines and statements of each folder

Tests are excluded. All imports count, also those in functions and for types, and are followed
through `__init__` modules. Layers are those of the contract that import-linter checks. A small
module has fewer than 60 lines of code and one importer. A private name of Keras is an attribute
that begins with an underscore, occurs in Keras's source, and is used but not defined in this code.

A docstring is complete if its `Args` name every parameter and it has `Returns` or `Yields`, or a
summary that begins with one of these words. Properties, methods with `@override` and functions
without parameters are not counted. A constructor's `Args` may be those of its class.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import keras
import tensorflow as tf

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("tfposeidon", "keras_callbacks", "datacache")
LIMITS = {
    "lines of Python": 27_000,
    "lines of datacache": 5_600,
    "statements": 11_500,
    "lines of the largest file": 450,
    "modules of tfposeidon": 112,
    "small modules of tfposeidon": 4,
    "layers of the import contract": 9,
    "longest chain of imports": 14,
    "methods of the optimizers' base class": 18,
    "of these abstract, constant or empty": 5,
    "frames from apply to the all-reduce": 5,
    "methods of Keras that are replaced": 3,
    "private names of Keras": 6,
    "sys._getframe, sys.last_value, except: pass": 0,
}
"""Limits of metrics; metrics without a limit are printed for comparison."""
SMALL, LONG = 60, 30
"""Lines of code below which a module is small, and lines above which a function is long."""
BASE = "CommunicatingOptimizer"
NOT_COUNTED = {"property", "override", "overload", "cached_property", "setter"}
AT_RUN_TIME = """
import pathlib, sys, traceback
import keras, tensorflow as tf, tfposeidon as tp
from tfposeidon.communication.topology import Topology
class Wire:
    topology = Topology.regular(0, 2, 1)
    def all_gather(self, tensor, group, name):
        return tf.concat([tensor, tensor], 0)
    def all_reduce(self, tensor, group, name, scale=1.0):
        if ".bucket" in name:
            package = pathlib.Path(tp.__file__).parent
            frames = [pathlib.Path(one.filename) for one in traceback.extract_stack()]
            print(sum(package in frame.parents for frame in frames) + 1)
            sys.exit()
        return tensor * 2.0 * scale
optimizer = tp.DistributedOptimizer(keras.optimizers.SGD(), scheme="allreduce")
of = (*keras.Model.__mro__, keras.optimizers.LossScaleOptimizer)
print(sum(hasattr(value, "_tfposeidon") for one in of for value in vars(one).values()))
optimizer.exchange._wire = optimizer.exchange.plans._wire = Wire
optimizer.apply([tf.ones([2])], [keras.Variable([1.0, 2.0])])
"""
"""Program that prints the number of methods of Keras that an optimizer replaces, and the number of
frames from `apply` to the collective, including both."""
AVOIDED = r"sys\._getframe|sys\.last_value|suppress\(Exception\)|except Exception:\s*pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revisions", nargs="*", help="git revisions; none is the working tree")
    parser.add_argument(
        "--missing", action="store_true", help="list documented names without complete docstrings"
    )
    parser.add_argument(
        "--folders", action="store_true", help="count lines and statements by folder"
    )
    options = parser.parse_args()
    if options.missing:
        print(*missing(Tree(ROOT)), sep="\n")
        return
    count = sizes_of_folders if options.folders else metrics
    columns = [at_revision(one, count) for one in options.revisions] or [count(Tree(ROOT))]
    print(f"{'':46}", *(f"{one[:9]:>10}" for one in options.revisions or ["now"]), "  at most")
    for label in sorted(set().union(*columns)) if options.folders else columns[-1]:
        limit = f"{LIMITS[label]:9,}" if label in LIMITS else ""
        found = (f"{column[label]:,}" if label in column else "-" for column in columns)
        print(f"{label:46}", *(f"{one:>10}" for one in found), limit)


def at_revision(revision: str, count: Callable[[Tree], dict[str, int]]) -> dict[str, int]:
    """Returns the metrics of a revision, which is read from a git archive."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return count(Tree(Path(folder)))


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    text: str
    tree: ast.Module
    is_package: bool

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.text.splitlines())

    @property
    def lines_of_code(self) -> int:
        """Number of lines with statements other than docstrings."""
        nodes = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and not _is_text(n)]
        simple = [n for n in nodes if not hasattr(n, "body")]
        found = {node.lineno for node in nodes}
        for node in simple:
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(found)


class Tree:
    """The modules of the packages below a folder, by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules: dict[str, Module] = {}
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                name = ".".join(path.relative_to(root).with_suffix("").parts)
                text = path.read_text()
                name, is_package = name.removesuffix(".__init__"), path.name == "__init__.py"
                self.modules[name] = Module(name, text, ast.parse(text), is_package)

    def of(self, *packages: str) -> list[Module]:
        """Returns the modules of some packages."""
        return [m for name, m in self.modules.items() if name.partition(".")[0] in packages]

    def nodes(self, *kinds: type) -> list[ast.AST]:
        """Returns the nodes of some kinds in all modules."""
        found = [node for module in self.modules.values() for node in ast.walk(module.tree)]
        return [node for node in found if isinstance(node, kinds)]


def metrics(tree: Tree) -> dict[str, int]:
    """Returns the code metrics of a tree, by label."""
    ours = tree.of("tfposeidon")
    functions = [n for n in tree.nodes(ast.FunctionDef) if isinstance(n, ast.FunctionDef)]
    base = methods_of(BASE, tree)
    named = [*documented(tree)]
    return {
        "lines of Python": sum(module.lines for module in tree.of(*PACKAGES)),
        **{f"lines of {one}": sum(m.lines for m in tree.of(one)) for one in PACKAGES},
        "statements": sum(not _is_text(node) for node in tree.nodes(ast.stmt)),
        "lines of the largest file": max(module.lines for module in tree.modules.values()),
        f"functions over {LONG} lines": sum(
            (node.end_lineno or 0) - node.lineno >= LONG for node in functions
        ),
        "modules of tfposeidon": len(ours),
        "small modules of tfposeidon": len(small(tree)),
        "layers of the import contract": layers(tree.root),
        "longest chain of imports": longest_chain(tree),
        "methods of the optimizers' base class": len(base),
        "of these abstract, constant or empty": sum(map(is_trivial, base)),
        **at_run_time(tree.root),
        "private names of Keras": len(private_names(ours)),
        "sys._getframe, sys.last_value, except: pass": len(
            re.findall(AVOIDED, "\n".join(module.text for module in ours))
        ),
        "raise statements": sum(node.exc is not None for node in _raises(tree)),
        "documented functions": len(named),
        "of these with complete docstrings": sum(not lacks(*one[1:]) for one in named),
    }


def sizes_of_folders(tree: Tree) -> dict[str, int]:
    """Returns lines and statements of each folder, and of modules directly in a package."""
    found: Counter[str] = Counter()
    for name, module in tree.modules.items():
        parts = name.split(".") if module.is_package else name.split(".")[:-1]
        folder = ".".join(parts[:2])
        found[f"{folder}: lines"] += module.lines
        statements = (node for node in ast.walk(module.tree) if isinstance(node, ast.stmt))
        found[f"{folder}: statements"] += sum(not _is_text(node) for node in statements)
    return dict(found)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _raises(tree: Tree) -> list[ast.Raise]:
    return [node for node in tree.nodes(ast.Raise) if isinstance(node, ast.Raise)]


# ------------------------------------------------------------------ imports


def imports_of(tree: Tree) -> dict[str, set[str]]:
    """Returns the modules that each module imports."""
    return {
        name: (_imported(module.tree) & set(tree.modules)) - {name}
        for name, module in tree.modules.items()
    }


def _imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def small(tree: Tree) -> list[str]:
    """Returns small modules, except those that the `__init__` of their package imports."""
    importers = Counter(one for found in imports_of(tree).values() for one in found)
    return [
        module.name
        for module in tree.of("tfposeidon")
        if module.lines_of_code < SMALL
        and importers[module.name] == 1
        and not module.is_package
        and not module.name.endswith("__main__")
        and not _is_shown(module.name, tree)
    ]


def _is_shown(name: str, tree: Tree) -> bool:
    package = tree.modules.get(name.rpartition(".")[0])
    return package is not None and name in _imported(package.tree)


def layers(root: Path) -> int:
    """Returns the number of layers in the import contract of the package."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    return len(settings["contracts"][0]["layers"])


def longest_chain(tree: Tree) -> int:
    """Returns the number of modules in the longest chain of imports."""
    imports = imports_of(tree)

    @cache
    def height(name: str) -> int:
        module = tree.modules[name]
        own = not module.is_package and not name.endswith("__main__")
        # Omit the packages of a module, which import it: this would be a cycle.
        below = {one for one in imports[name] if not name.startswith(f"{one}.")}
        return own + max(map(height, below), default=0)

    return max(height(module.name) for module in tree.of("tfposeidon"))


# ------------------------------------------------------------------ the base class, and Keras


def methods_of(name: str, tree: Tree) -> list[ast.FunctionDef]:
    """Returns the methods and properties of a class, or an empty list without that class."""
    found = [n for n in tree.nodes(ast.ClassDef) if isinstance(n, ast.ClassDef) and n.name == name]
    return [node for one in found for node in one.body if isinstance(node, ast.FunctionDef)]


def is_trivial(method: ast.FunctionDef) -> bool:
    """Returns whether a method raises, does nothing, or returns a constant."""
    body = [node for node in method.body if not _is_text(node)]
    if len(body) != 1:
        return not body
    (only,) = body
    if not isinstance(only, ast.Return) or only.value is None:
        return isinstance(only, ast.Raise | ast.Pass)
    return bool(
        re.fullmatch(r"[\[({][\])}]|[\w.]*([A-Z]\w*|nullcontext)\(\)", ast.unparse(only.value))
    ) or (isinstance(only.value, ast.Constant))


def at_run_time(root: Path) -> dict[str, int]:
    """Returns the metrics that `AT_RUN_TIME` prints for a tree, from a separate process."""
    command = [sys.executable, "-c", AT_RUN_TIME]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=root == ROOT)
    # The program fails on revisions that lack attributes which it uses.
    replaced, frames = done.stdout.split()[-2:] if not done.returncode else ("", "")
    found = {
        "frames from apply to the all-reduce": frames,
        "methods of Keras that are replaced": replaced,
    }
    return {label: int(number) for label, number in found.items() if number}


def private_names(modules: list[Module]) -> set[str]:
    """Returns the private names of Keras that modules use."""
    used, defined = set(), set()
    for node in (node for module in modules for node in ast.walk(module.tree)):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (defined if own and isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    # `tf.data` has some of these names, too.
    return ((used - defined) & words_of_keras()) - set(dir(tf.data.Dataset))


@cache
def words_of_keras() -> frozenset[str]:
    """Returns the private names that Keras's source defines or uses."""
    sources = Path(keras.__file__).parent.rglob("*.py")
    texts = [path.read_text(errors="ignore") for path in sources]
    name = r"(?:\.|\bdef |\bclass )(_[a-z]\w*)"
    return frozenset(word for text in texts for word in re.findall(name, text))


# ------------------------------------------------------------------ docstrings


def documented(tree: Tree) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Yields functions of docs/api.md: module and name, the function, its class's docstring."""
    wanted = _names_in_docs((tree.root / "docs/api.md").read_text())
    for module in tree.modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef) and _is_wanted(module.name, node.name, wanted):
                yield f"{module.name}.{node.name}", node, ""
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and _is_counted(method):
                        name = f"{node.name}.{method.name.replace('__init__', '')}".rstrip(".")
                        if _is_wanted(module.name, name, wanted):
                            where = f"{module.name}.{node.name}.{method.name}"
                            yield where, method, ast.get_docstring(node) or ""


def _names_in_docs(text: str) -> set[tuple[str, str]]:
    """Returns pairs of a module's or package's name and a name in it; `*` is any public name."""
    found = set()
    directive = r"^\.\. auto(\w+):: ([\w.]+)\n(?:   :members:([^\n]*)\n)?"
    for kind, name, members in re.findall(directive, text, re.MULTILINE):
        package, _, short = name.rpartition(".")
        listed = [one.strip() for one in members.split(",") if one.strip()]
        every = [] if listed or f"{name}\n   :members:" not in text else ["*"]
        if kind == "module":
            found |= {(name, one) for one in [*listed, *(f"{one}.*" for one in listed), *every]}
        else:
            package = package.partition(".")[0]
            found |= {(package, one) for one in [short, *(f"{short}.{m}" for m in listed + every)]}
    return found


def _is_wanted(module: str, name: str, wanted: set[tuple[str, str]]) -> bool:
    owner, _, member = name.rpartition(".")
    if any(part.startswith("_") for part in (*module.split("."), owner, member)):
        return False
    parents = [module[: match.start()] for match in re.finditer(r"\.|$", module)]
    names = (name, f"{owner}.*")
    listed = any((parent, one) in wanted for parent in parents for one in names)
    return listed or any((parent, "*") in wanted for parent in parents)


def _is_counted(function: ast.FunctionDef) -> bool:
    decorators = {re.sub(r"\(.*", "", ast.unparse(d)) for d in function.decorator_list}
    return not NOT_COUNTED & {name.rpartition(".")[2] for name in decorators}


def lacks(function: ast.FunctionDef, of_class: str) -> list[str]:
    """Returns the sections that a docstring lacks."""
    text = ast.get_docstring(function) or ""
    text += f"\n{of_class}" if function.name == "__init__" else ""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:(?:[ \t].*)?\n?)*)", text, re.MULTILINE)
    names = re.findall(r"^\s+`?\*{0,2}(\w+)`?\s*[:(,]", "".join(sections), re.MULTILINE)
    annotation = ast.unparse(function.returns) if function.returns else "None"
    gives = annotation not in ("None", "Iterator[None]") and function.name != "__init__"
    says = re.search(r"\A(Returns|Yields) |^(Returns|Yields):$", text, re.MULTILINE)
    lacking = [] if set(_parameters(function)) <= set(names) else ["Args"]
    return lacking + (["Returns"] if gives and not says else [])


def _parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [star for star in (arguments.vararg, arguments.kwarg) if star]
    found = [argument.arg for argument in named]
    return [name for name in found if name not in ("self", "cls") and not name.startswith("_")]


def missing(tree: Tree) -> Iterator[str]:
    """Yields documented functions without complete docstrings, and what these lack."""
    for name, function, of_class in documented(tree):
        if lacking := lacks(function, of_class):
            yield f"{name}: {', '.join(lacking)}"


if __name__ == "__main__":
    main()
