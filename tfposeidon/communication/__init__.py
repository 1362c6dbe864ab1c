"""Communication between ranks: topology, collectives, start of Horovod, and failure reports."""
