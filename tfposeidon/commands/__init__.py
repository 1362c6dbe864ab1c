"""Implements the commands `python -m tfposeidon check` and `install`."""
