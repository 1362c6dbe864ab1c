"""Tests the folders of tests, and their use of private attributes."""

import ast
import re
import socketserver
from pathlib import Path

import keras

from benchmarks import structure

TESTS = Path(__file__).parent
OF_NAMED_TUPLES = {"_replace", "_asdict", "_make", "_fields"}


def test_only_tests_in_jobs_start_jobs():
    """`make test-fast` must start no jobs."""
    for path in TESTS.rglob("test_*.py"):
        if path.is_relative_to(TESTS / "jobs"):
            continue
        imported = re.findall(r"from tests\.launch import (.+)", path.read_text())
        names = {name.strip() for line in imported for name in line.split(",")}
        assert names <= {"ROOT"}, (
            f"{path.relative_to(TESTS)} imports {sorted(names)} from tests.launch: "
            "move it to tests/jobs"
        )


def _private_names(path):
    """Yields the names of private attributes that a file reads from other objects."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or not re.match("_[^_]", node.attr):
            continue
        if getattr(node.value, "id", None) not in ("self", "cls", "os"):
            yield node.attr


def test_private_attributes_are_named_with_a_reason():
    used = {
        name
        for path in TESTS.rglob("*.py")
        if not path.is_relative_to(TESTS / "ranks")
        for name in _private_names(path)
    }
    text = (TESTS.parent / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (`_.+?`) \| [^|]+ \| [^|]+ \|$", text, re.MULTILINE)
    assert used - OF_NAMED_TUPLES == {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_public_names_have_complete_docstrings():
    """Checks names of docs/api.md, because ruff requires neither `Args` nor `Returns`."""
    assert [*structure.missing(structure.Tree(structure.ROOT))] == []


def _names(tree):
    """Yields names that a module uses, and words of its short strings, which may be looked up."""
    for node in ast.walk(tree):
        for part in ("id", "attr", "arg"):
            yield getattr(node, part, None)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 80:
            yield from re.findall(r"\w+", node.value)


def test_each_function_has_a_use_outside_of_tests():
    """If the last call of a function is deleted, only its tests still use the function."""
    root = TESTS.parent
    product = [path for package in structure.PACKAGES for path in (root / package).rglob("*.py")]
    others = [*root.glob("*.py"), *(root / "examples").rglob("*.py")]
    trees = {path: ast.parse(path.read_text()) for path in [*product, *others]}
    used = {name for tree in trees.values() for name in _names(tree)}
    pages = [root / "README.md", *(root / "docs").glob("*.md")]
    used |= set(re.findall(r"\w+", " ".join(path.read_text() for path in pages)))
    # Keras and Python's server call these methods.
    bases = (keras.Layer, keras.optimizers.Optimizer, socketserver.BaseServer)
    used |= {"do_GET", "do_PUT", "do_DELETE", "log_message"}.union(*map(dir, bases))
    unused = {
        f"{path.relative_to(root)}: {node.name}"
        for path in product
        for node in ast.walk(trees[path])
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("__")
        and node.name not in used
    }
    assert unused == set()
