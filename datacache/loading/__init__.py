"""Loads batches in a process separate from the training process (Theano-MPI, section 3.3)."""
