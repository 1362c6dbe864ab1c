"""The commands `python -m tfposeidon check` and `install`."""
