"""Worlds: the ranks, nodes and other settings of the job that a test needs."""

import dataclasses
import shutil

import horovod.tensorflow as hvd
import pytest

from tests import launch

LIMIT_S = 300
"""Limit for tests that hang: ten times the longest test on two idle CPU cores."""
INIT = {"stall_timeout_s": 2 * LIMIT_S, "network": "unknown"}
"""Arguments of `tp.init` that a mark may replace.

The session ends a test that hangs, with the stacks of all ranks, before the stall timeout of the
ranks. Without a network profile, tests that name no scheme use all-reduce.
"""


@dataclasses.dataclass(frozen=True)
class World:
    """One layout, and the options, of `@pytest.mark.ranks(*layouts, ...)`.

    Args:
      layout: "2" (ranks), "2x2" (nodes times ranks per node) or "2+1" (ranks of each node).
      lab: Options of the lab's network, such as "--inter 200mbit"; by default there is no lab.
      launcher: "horovodrun" or "mpirun".
      own_network: True for a separate loopback interface, without the bytes of other jobs.
      processors: Number of CPU cores that each rank may use; by default all.
      environment: Additional variables of the job; the value `None` removes a variable.
      init: Arguments of `tp.init`, in addition to `INIT`.
      job: Name of a separate job, if one job for all tests would take too long; jobs run in
        parallel.
    """

    layout: str
    lab: str = ""
    launcher: str = "horovodrun"
    own_network: bool = False
    processors: int | None = None
    environment: tuple = ()
    init: tuple = ()
    job: str = ""

    @classmethod
    def of(cls, *layouts, environment=(), **options):
        own = {field.name for field in dataclasses.fields(cls)}
        what = {name: options.pop(name) for name in own & options.keys()}
        variables, init = tuple(dict(environment).items()), tuple(options.items())
        return [cls(layout, environment=variables, init=init, **what) for layout in layouts]

    def __str__(self):
        extras = ["lab"] if self.lab else []
        extras += [self.launcher] if self.launcher != "horovodrun" else []
        extras += ["network"] if self.own_network else []
        extras += [f"processors={self.processors}"] if self.processors else []
        extras += [f"{name}={value}" for name, value in (*self.environment, *self.init)]
        extras += [self.job] if self.job else []
        return "-".join([self.layout, *extras])

    @property
    def nodes(self):
        """Returns the number of ranks on each node."""
        if "x" in self.layout:
            nodes, ranks = map(int, self.layout.split("x"))
            return [ranks] * nodes
        return [int(ranks) for ranks in self.layout.split("+")]

    @property
    def size(self):
        return sum(self.nodes)

    @property
    def arguments_of_init(self):
        # The lab's nodes have names, by which `tp.init` finds them.
        nodes = {} if self.lab or len(self.nodes) == 1 else {"ranks_per_node": self.nodes[0]}
        return {**nodes, **INIT, **dict(self.init)}

    def command(self, *program):
        """Returns the command that starts `program` on every rank."""
        if self.lab:
            shape = f"--nodes {len(self.nodes)} --per-node {self.nodes[0]} {self.lab}"
            return launch.lab_command(shape, *program)
        if self.launcher == "mpirun":
            options = ["--allow-run-as-root", "--oversubscribe", "-np", str(self.size)]
            return ["mpirun", *options, *program]
        command = launch.horovodrun_command(self.size, *program)
        if not self.own_network:
            return command
        # Mount /sys again, because it counts the bytes of the network in which it was mounted.
        begin = 'mount -t sysfs none /sys && ip link set lo up && exec "$0" "$@"'
        return ["unshare", "--net", "--mount", "--map-root-user", "sh", "-c", begin, *command]

    def why_not(self):
        """Returns the reason why this machine cannot start the job, or `None`."""
        if self.launcher == "mpirun" and not (hvd.mpi_built() and shutil.which("mpirun")):
            return "requires mpirun, and a Horovod built with MPI"
        return None


def pytest_generate_tests(metafunc):
    """Parametrizes a test over its worlds; tests/conftest.py imports this hook.

    Marks of the test take precedence over those of its class, and these over those of its module.
    `make test` includes worlds with `core=True`.
    """
    marks = list(metafunc.definition.iter_markers_with_node("ranks"))
    worlds = []
    for owner, mark in reversed(marks):
        if owner is marks[0][0]:
            options = dict(mark.kwargs)
            core = [pytest.mark.core] if options.pop("core", False) else []
            made = World.of(*mark.args, **options)
            worlds += [pytest.param(world, marks=core, id=str(world)) for world in made]
    if worlds:
        metafunc.fixturenames.append("world")
        metafunc.parametrize("world", worlds)


def world_of(item):
    """Returns the world of a collected test, or `None` if it needs no ranks."""
    return item.callspec.params.get("world") if hasattr(item, "callspec") else None


def prepare(item):
    """Disables the session's time limit of a test on ranks, because its job has the limit."""
    if not world_of(item):
        raise pytest.UsageError(f"`ranks` must mark a function, class or module: {item.nodeid}")
    item.add_marker(pytest.mark.timeout(0), append=False)


def limit_of(item):
    """Returns the seconds that a test may take on ranks."""
    limits = (mark.args[0] for mark in item.iter_markers("timeout") if mark.args)
    return next(filter(None, limits), LIMIT_S)
