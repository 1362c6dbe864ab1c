"""Hides JAX from jobs: TensorFlow imports it where it is installed, in a second or more."""

raise ImportError("jobs of tests do without JAX")
