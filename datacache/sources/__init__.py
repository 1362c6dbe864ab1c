"""Where samples come from: one kind of source per file."""
