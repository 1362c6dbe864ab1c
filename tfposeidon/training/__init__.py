"""Keras's training loop: patched methods, sessions of models, equal epochs, state of layers."""
