"""What a gradient is: its description, its factors, rows of embeddings, and sums over several steps."""
