"""Tests that start jobs belong in `tests/jobs`, so that `make test-fast` starts none."""

import re
from pathlib import Path


def test_only_tests_in_jobs_start_jobs():
    tests = Path(__file__).parent
    for path in tests.rglob("test_*.py"):
        if path.is_relative_to(tests / "jobs"):
            continue
        imported = re.findall(r"from tests\.launch import (.+)", path.read_text())
        names = {name.strip() for line in imported for name in line.split(",")}
        assert names <= {"ROOT"}, (
            f"{path.relative_to(tests)} imports {sorted(names)} from tests.launch: "
            "move it to tests/jobs"
        )
