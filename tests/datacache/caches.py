"""Sizes of the caches in tests, and the numbers of the samples in their batches."""

from tests import drawn

SAMPLES, BATCH = 24, 7


def sample_numbers(data):
    return drawn.numbers(data, SAMPLES)
