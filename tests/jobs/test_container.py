"""Runs the steps of the container file as a script, with installed third-party packages."""

import os
import re
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.launch import ROOT, ahead, finish, start

PLATFORM = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
CONTAINERFILE = ROOT / "examples/cluster/Containerfile"


def _script(root):
    """Returns the file's steps as a shell script; `root` replaces the container's root folder."""
    lines = ["set -ex", "unset PYTHONPATH VIRTUAL_ENV"]
    for step in re.findall(r"^(RUN|COPY|WORKDIR) (.+)$", CONTAINERFILE.read_text(), re.MULTILINE):
        match step:
            case ("RUN", command) if command.startswith("apt-get"):
                pass  # The packages of this machine are used.
            case ("RUN", command):
                lines.append(command)
            case ("COPY", copy):
                target = root / copy.removeprefix(". /")
                lines.append(f"mkdir -p {target}")
                archive = f"tar -C {ROOT} --null --files-from=- -c"
                lines.append(f"git -C {ROOT} ls-files -z | {archive} | tar -C {target} -x")
                lines += _compiled(target / "build" / f"lib.{PLATFORM}")
            case ("WORKDIR", folder):
                lines.append(f"mkdir -p {root}{folder} && cd {root}{folder}")
    return "\n".join(lines)


def _compiled(folder):
    """Yields commands that copy compiled libraries to the folder whose files a build reuses."""
    for library in ("tfposeidon/native/_ops.so", "datacache/native/_records.so"):
        yield f"install -D {ROOT / library} {folder / library}"
        # The library must be newer than the joined sources, which each build writes.
        yield f"touch -d tomorrow {folder / library}"


def as_a_script():
    """Runs the steps in a separate environment and folder.

    The environment links to the packages that `make setup` has installed, except for Horovod and
    this project, and uses the libraries that `make setup` has compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv = finish(start([sys.executable, "-m", "venv", f"{folder}/venv"]))
        assert venv.returncode == 0, venv.stdout
        (own,) = Path(folder).glob("venv/lib/python*/site-packages")
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            link = own / package.name
            if not link.exists() and not re.search("tfposeidon|horovod", package.name):
                link.symlink_to(package)
        path = os.pathsep.join([f"{folder}/venv/bin", os.environ["PATH"]])
        return finish(start(["bash", "-c", _script(Path(folder) / "root")], {"PATH": path}))


@ahead(as_a_script)
def test_the_steps_of_the_container_file_run(outcome):
    done = outcome
    assert done.returncode == 0, done.stdout[-4000:]
    assert "averages are correct on all 2 rank(s)" in done.stdout, done.stdout[-4000:]
