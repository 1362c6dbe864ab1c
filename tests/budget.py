"""Runs parts of `.ci/run`, and prints the minutes of each part and its budget.

    python tests/budget.py PART ...

A part is a target of the Makefile. The table under "Time budget" in CONTRIBUTING.md lists its
elapsed minutes and its CPU-minutes. A part fails if it uses more than twice its CPU-minutes. A
change that adds minutes must save as many elsewhere.

If up to three tests fail, they run once more alone, because some tests measure a network or a
machine that is shared with other work. Tests that pass the second time are listed at the end.
"""

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 2
"""Factor by which a part may exceed its budget, because the speeds of machines differ."""
FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
MOST_RETRIED = 3
"""Largest number of failed tests of a part that are repeated."""


def budgets():
    """Returns the minutes and CPU-minutes of each part, from CONTRIBUTING.md."""
    rows = re.findall(
        r"^\| `make ([\w-]+)` \| ([\d.]+) \| ([\d.]+) \|",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    return {part: (float(minutes), float(cpu)) for part, minutes, cpu in rows}


def run(part):
    """Returns exit code, minutes and CPU-minutes of `make part`, and the tests that it repeated."""
    begin, before = time.monotonic(), _cpu_s()
    FAILED.unlink(missing_ok=True)
    code = subprocess.run(["make", part], cwd=ROOT).returncode
    failed = list(json.loads(FAILED.read_text())) if code and FAILED.exists() else []
    if 0 < len(failed) <= MOST_RETRIED:
        print("\nrepeated alone:", *failed, sep="\n", flush=True)
        code = subprocess.run(["make", part, "TESTS=--last-failed"], cwd=ROOT).returncode
    return code, (time.monotonic() - begin) / 60, (_cpu_s() - before) / 60, failed


def _cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(*parts):
    known = budgets()
    if missing := [part for part in parts if part not in known]:
        sys.exit(f"CONTRIBUTING.md has no budget for {missing}; it has {list(known)}")
    lines, failed = [], []
    for part in parts:
        code, minutes, cpu, twice = run(part)
        of_minutes, of_cpu = known[part]
        lines.append(f"{part:14} {minutes:5.1f} of {of_minutes:4.1f} {cpu:9.1f} of {of_cpu:4.1f}")
        if code:
            failed.append(f"make {part} ended with {code}")
        else:
            lines += [f"  failed once, and passed by itself: {test}" for test in twice]
        if cpu > MOST * of_cpu:
            failed.append(f"make {part} took {cpu:.1f} CPU-minutes, more than {MOST} x {of_cpu:g}")
    print("\npart            minutes         CPU-minutes", *lines, *failed, sep="\n", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
