"""Parts of the DAWNBench run; `examples/dawnbench_resnet50.py` starts it."""
