"""Exchange of gradients in each step, by a plan that all ranks have agreed on."""
