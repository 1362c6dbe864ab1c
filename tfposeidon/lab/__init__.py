"""Emulates a cluster on one machine, with network namespaces and shaped links.

`command` checks the options and restarts Python inside private namespaces. There, `inside` builds
the `network`, starts the ranks and writes the report. When the last process ends, the kernel
removes the namespaces and links.

`architectures` and `accelerator` make Keras models that wait for the step times of the papers'
models instead of computing. `demo` compares schemes on one of them.
"""
