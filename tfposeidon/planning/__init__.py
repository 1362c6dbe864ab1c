"""Choice of the scheme for each gradient: buckets, servers, and advice about the plan."""
