"""Where tests stand, and what they reach into."""

import ast
import re
from pathlib import Path

from benchmarks import structure

TESTS = Path(__file__).parent
OF_NAMED_TUPLES = {"_replace", "_asdict", "_make", "_fields"}


def test_only_tests_in_jobs_start_jobs():
    """So that `make test-fast` starts none."""
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
    """Names with an underscore that a file takes from anything but itself."""
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
    """Names of docs/api.md, of which ruff asks none."""
    assert [*structure.missing(structure.Tree(structure.ROOT))] == []
