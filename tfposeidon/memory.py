"""Measures the memory available to this process, within the limits of its machine and containers.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst,
proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from os import major, minor
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SPARE_SHARE = 20
"""Divisor: 1/20 of each limit stays free, because other processes may allocate memory."""

FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    "cgroup2": ("memory.max", "memory.current", ""),
}
"""Maps the file system of cgroups (version 1 or 2) to the names of the files with limit and usage,
and to the prefix of those statistics that include child cgroups, as the usage does."""


class _Mount(NamedTuple):
    device: str
    root: str
    point: Path
    file_system: str
    options: list[str]


def available_memory(proc: Path = PROC) -> int:
    """Returns the bytes that can be allocated within all memory limits, less 1/20 of each limit."""
    # Take the minimum over the machine and each container, less a reserve. The page cache of files
    # counts as free, because the kernel reclaims it.
    found = _first_numbers(proc / "meminfo")
    machine = (1024 * found["MemTotal:"], 1024 * found["MemAvailable:"])
    limits = (machine, *_containers(proc))
    return max(0, min(left - total // SPARE_SHARE for total, left in limits))


def is_memory(device: int, proc: Path = PROC) -> bool:
    """Returns whether a device (`st_dev` of a file) stores files in memory (tmpfs or ramfs)."""
    name = f"{major(device)}:{minor(device)}"
    return any(
        mount.device == name and mount.file_system in ("tmpfs", "ramfs") for mount in _mounts(proc)
    )


def _containers(proc: Path) -> Iterator[tuple[int, int]]:
    """Yields limit and free bytes of each cgroup that contains this process."""
    cgroups = proc / "self" / "cgroup"
    # Kernels without cgroups do not have this file.
    for line in cgroups.read_text().splitlines() if cgroups.exists() else ():
        number, controllers, path = line.split(":", 2)
        file_system = "cgroup2" if number == "0" else "cgroup"
        for mount in _mounts(proc):
            # In version 1, only the mount with the memory controller has the limits.
            has_memory = "memory" in controllers.split(",") and "memory" in mount.options
            if mount.file_system == file_system and (number == "0" or has_memory):
                yield from _enclosing_limits(mount, path)


def _enclosing_limits(mount: _Mount, path: str) -> Iterator[tuple[int, int]]:
    """Yields limit and free bytes of a cgroup and of its parents, because all limits apply."""
    # In a container, the mount starts at the container's cgroup, and `path` is relative to the
    # machine or to the container.
    inside = path.removeprefix(mount.root).strip("/") if ".." not in path else ""
    folder, (limit_file, used_file, prefix) = mount.point / inside, FILES[mount.file_system]
    for cgroup in (folder, *folder.parents):
        file = cgroup / limit_file
        # The root cgroup and cgroups without the memory controller have no limit.
        limit = file.read_text().strip() if file.exists() else "max"
        if limit != "max":
            stat = _first_numbers(cgroup / "memory.stat")
            # Do not count the whole page cache: it includes tmpfs files, which cannot be reclaimed.
            reclaimable = sum(
                stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive")
            )
            used = int((cgroup / used_file).read_text()) - reclaimable
            yield int(limit), int(limit) - used
        if cgroup == mount.point:
            return


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in (proc / "self" / "mountinfo").read_text().splitlines():
        # Split at the dash, because the number of fields before it varies.
        before, _, after = line.partition(" - ")
        _, _, device, root, point, *_ = before.split()
        file_system, *_, options = after.split()
        yield _Mount(device, root, Path(point), file_system, options.split(","))


def _first_numbers(path: Path) -> dict[str, int]:
    """Returns the first number of each line, keyed by the word before the number."""
    return {
        name: int(number) for name, number in re.findall(r"^(\S+)\s+(\d+)", path.read_text(), re.M)
    }
