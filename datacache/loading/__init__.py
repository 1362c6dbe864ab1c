"""Loader process for batches, separate from the training process (Theano-MPI, section 3.3)."""
