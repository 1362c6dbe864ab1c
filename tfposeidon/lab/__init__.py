"""The lab: a cluster on one machine, made of namespaces and shaped links.

`command` reads and checks the request, `sandbox` re-enters Python inside private namespaces, and
there `inside` builds the `network`, starts the `ranks` and writes the `report`. When the last
process ends, the kernel removes everything.

`models` and `accelerator` make Keras models that train as slowly as those of the papers without
using the CPU; `demo` compares schemes on one of them.
"""
