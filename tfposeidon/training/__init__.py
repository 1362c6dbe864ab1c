"""Integrates with Keras's training loop: patches, model sessions and epochs of equal length."""
