"""Sends gradients of matrices as two thin matrices, their sufficient factors (Poseidon's SFB)."""
