"""Stages of `benchmarks.gpu_check`."""
