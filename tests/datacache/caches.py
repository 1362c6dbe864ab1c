"""Defines the sizes of the caches in tests, and finds the numbers of the samples in batches."""

from tests import drawn

SAMPLES, BATCH = 24, 7


def sample_numbers(data):
    return drawn.numbers(data, SAMPLES)
