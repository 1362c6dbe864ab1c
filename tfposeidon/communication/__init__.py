"""Ranks find one another and exchange tensors: topology, wire, runtime and failure."""
