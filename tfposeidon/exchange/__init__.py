"""Carries out a plan in each step, after all ranks have agreed on it."""
