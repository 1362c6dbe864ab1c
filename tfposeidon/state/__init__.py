"""State of a job on disk, and its redistribution over another number of ranks."""
