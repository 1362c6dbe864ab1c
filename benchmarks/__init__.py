"""Benchmarks, which compare two or more systems in one run."""
