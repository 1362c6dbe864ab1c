"""Which gradient is exchanged by which scheme: buckets, servers, and advice about the plan."""
