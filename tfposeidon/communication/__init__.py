"""Communication between ranks: topology, wire, runtime, and reports of failures."""
