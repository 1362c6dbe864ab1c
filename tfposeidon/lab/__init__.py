"""The lab: a cluster that is emulated on one machine by network namespaces and shaped links.

`command` reads and checks the options, and restarts Python inside private namespaces. There,
`inside` builds the `network`, starts the ranks and writes the report. When the last process ends,
the kernel removes everything.

`architectures` and `accelerator` make Keras models that train as slowly as those of the papers
without using the CPU. `demo` compares schemes on one of them.
"""
