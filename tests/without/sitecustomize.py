"""Disables useless garbage collections in jobs, which take 1.1 of the 3 seconds of a process.

TensorFlow's modules live as long as the process. Garbage collections traverse them during imports,
and again when the interpreter ends.
"""

import atexit
import gc

gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)
