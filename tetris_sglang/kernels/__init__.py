"""Triton kernels for the small steps around the two models' passes: each replaces many launches by one.

Import the modules, lazily, where there is a CUDA device: this package itself imports nothing. `tetris_sglang.packing`,
`.selection` and `.acceptance` are what they equal.
"""
