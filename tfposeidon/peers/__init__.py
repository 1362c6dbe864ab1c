"""Connects ranks by the environment variables of their platform, without SSH.

`sources` reads a platform's variables. In `rendezvous`, ranks publish their addresses in a `store`
on the node of rank 0, and derive Horovod's variables from all addresses. `run` starts the ranks of
one machine.
"""
