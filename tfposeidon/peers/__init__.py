"""Ranks that find each other by the variables of their platform, without SSH.

A source reads a platform's variables, a store on the node of rank 0 holds what ranks publish, and
in a meeting they get Horovod's variables from it. `run` starts the ranks of one machine.
"""
