"""Planning: assigns a scheme and a bucket to each gradient, and predicts the time of a step."""
