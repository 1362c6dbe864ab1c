"""Measurements: ratios of two things timed in turn in one run."""
