"""Planning: assigns a scheme and a bucket to each gradient."""
