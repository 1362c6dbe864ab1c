"""Workers that exchange with a server, each at its own pace."""
