"""Runs `horovodrun` without its check for Gloo, which would import TensorFlow."""

import sys

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    sys.exit(launch.run_commandline())
