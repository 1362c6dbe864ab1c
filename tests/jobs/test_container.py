"""The steps of the container file work as a script, in an empty environment."""

import os
import re
import subprocess
import sys

from tests.launch import ROOT

CONTAINERFILE = ROOT / "examples/cluster/Containerfile"


def _script(root):
    """Returns the file's steps as a shell script; `root` stands for the container's root folder."""
    lines = ["set -ex"]
    for step in re.findall(r"^(RUN|COPY|WORKDIR) (.+)$", CONTAINERFILE.read_text(), re.MULTILINE):
        match step:
            case ("RUN", command) if command.startswith("apt-get"):
                pass  # the machine's own packages
            case ("RUN", command):
                lines.append(command)
            case ("COPY", copy):
                target = root / copy.removeprefix(". /")
                lines.append(f"mkdir -p {target}")
                archive = f"tar -C {ROOT} --null --files-from=- -c"
                lines.append(f"git -C {ROOT} ls-files -z | {archive} | tar -C {target} -x")
            case ("WORKDIR", folder):
                lines.append(f"mkdir -p {root}{folder} && cd {root}{folder}")
    return "\n".join(lines)


def test_steps_run_as_a_script(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    path = os.pathsep.join([str(tmp_path / "venv/bin"), os.environ["PATH"]])
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    done = subprocess.run(
        ["bash", "-c", _script(tmp_path / "root")],
        env=environment | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "sums are right on all 2 rank(s)" in done.stdout, done.stdout[-4000:]
