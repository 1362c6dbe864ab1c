"""Asynchronous elastic averaging: workers exchange weights with a server, each at its own pace."""
