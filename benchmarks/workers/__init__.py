"""What runs on the ranks of a benchmark: one module for each system that is measured."""
