"""Sufficient factors: gradients of matrices that are sent as two thin matrices (Poseidon's SFB)."""
