"""Sizes of the caches that tests open, and the samples that their batches hold."""

from tests import drawn

SAMPLES, BATCH = 24, 7


def sample_numbers(data):
    return drawn.numbers(data, SAMPLES)
