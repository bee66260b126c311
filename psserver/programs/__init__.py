"""Update programs: an interpreter, and compiled kernels for programs that can be fused."""
