"""Choice of plans by prediction and measurement: the policy `auto`, and predicted steps."""
