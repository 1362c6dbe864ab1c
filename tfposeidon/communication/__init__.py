"""Starts Horovod, describes the topology, provides collectives and reports failures."""
