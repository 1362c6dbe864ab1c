"""What Keras's training loop has to know: patched methods, a model's optimizers, epochs that end together."""
