"""How the nodes of a job share the samples of a cache."""
