"""Benchmarks, which measure ratios of two systems in one run."""
