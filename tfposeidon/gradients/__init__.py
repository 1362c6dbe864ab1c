"""Gradients: descriptions, the reading of their structure, and accumulation over steps."""
