"""Exchanges gradients in each step, by a plan that all ranks have agreed on."""
