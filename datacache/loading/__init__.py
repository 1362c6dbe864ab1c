"""A process beside the training process that loads batches in parallel (Theano-MPI, section 3.3)."""
