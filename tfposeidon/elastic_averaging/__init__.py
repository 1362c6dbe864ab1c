"""Averages weights asynchronously: each worker exchanges weights with a server at its own pace."""
