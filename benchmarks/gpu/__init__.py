"""The measurements that want a GPU, in slices of a few minutes; `python -m benchmarks gpu`."""
