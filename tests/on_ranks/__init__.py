"""Cases that run on real Horovod ranks: every `case_*` function of these modules, on every rank.

A case gets the wire and raises where something is wrong. `tests/jobs/test_on_ranks.py` starts one
job per world, in which all of its cases run, and shows each as a test of its own.
"""
