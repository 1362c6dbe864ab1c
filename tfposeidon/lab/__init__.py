"""The lab: a cluster on one machine, made of namespaces and shaped links.

`command` reads and checks the request, `sandbox` re-enters Python inside private namespaces, and there
`inside` builds the `network` and starts the `ranks`. When the last process ends, the kernel removes all.
"""
