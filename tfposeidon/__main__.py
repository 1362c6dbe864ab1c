"""Runs the commands of `python -m tfposeidon`."""

import argparse
import sys

from tfposeidon import __version__
from tfposeidon.commands import versions

try:
    versions.require_python()
except versions.InstallError as error:
    sys.exit(str(error))

# Import these modules after the check, because older versions of Python reject their syntax.
from tfposeidon.commands import check, install
from tfposeidon.lab import command as lab
from tfposeidon.lab import demo
from tfposeidon.peers import run

COMMANDS = {
    "check": (check, "report versions and topology, and run a collective; also under horovodrun"),
    "demo": (demo, "compare schemes in the lab, with a slow network between emulated nodes"),
    "install": (install, "install TensorFlow if it is missing, and a patched Horovod"),
    "lab": (lab, "run a training script on emulated nodes with slow links between them"),
    "run": (run, "start the ranks of this machine, one per GPU"),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tfposeidon", description="Keras 3 training over slow networks."
    )
    parser.add_argument("--version", action="version", version=f"tfposeidon {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    options = parser.parse_args()
    # The lab restarts itself with these arguments inside its namespaces.
    options.arguments = sys.argv[2:]
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
