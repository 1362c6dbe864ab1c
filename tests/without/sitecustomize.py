"""Collects garbage rarely: collections during imports took each process 0.4 of its 2.8 seconds."""

import gc

gc.set_threshold(50_000, 20, 20)
