"""Gradients: descriptions, sufficient factors, embedding rows, and accumulation over steps."""
