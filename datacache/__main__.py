"""Entry point of `python -m datacache`."""

import sys

from datacache.command.main import main

if __name__ == "__main__":
    sys.exit(main())
