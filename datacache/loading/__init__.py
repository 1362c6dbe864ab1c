"""Loader process beside the training process, for batches (Theano-MPI, section 3.3)."""
