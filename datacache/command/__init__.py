"""The command `python -m datacache`."""
