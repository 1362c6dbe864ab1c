"""Ranks that find each other by the variables of their platform, without SSH.

A source reads a platform's variables. Ranks publish their addresses in a store on the node of
rank 0, and derive Horovod's variables from the addresses of all. `run` starts the ranks of one
machine.
"""
