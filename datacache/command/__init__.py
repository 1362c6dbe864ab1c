"""Command `python -m datacache`."""
