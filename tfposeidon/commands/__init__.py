"""Commands `python -m tfposeidon check` and `install`."""
