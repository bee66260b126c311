"""Update programs: an interpreter, and compiled kernels for those that can be fused."""
