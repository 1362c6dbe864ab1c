"""Hides JAX from jobs, because TensorFlow would import it, which takes a second or more."""

raise ImportError("JAX is hidden from jobs of tests")
