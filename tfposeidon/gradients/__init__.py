"""Gradients: their descriptions, their factors, rows of embeddings, and sums over several steps."""
