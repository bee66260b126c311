"""Update programs as compiled kernels: split into steps, written as source, compiled, launched on pieces.

fusion      splits a program into elementwise steps, one kernel each, and steps that are interpreted
codegen     the text of a kernel, from the table of ops: Numba's Python, or CUDA
compiler    compiles the text in the background and keeps the results; the only place that runs text
machine_code  machine code as bytes: from Numba's LLVM text, and loaded without Numba
kept        machine code in a folder, for other processes
background  one thread that does work in order, and can be left behind
kernels     a server's steps, kernels and threads
launch      runs a kernel over pieces of memory, by several threads
rows        runs a program on selected rows of a variable
row_groups  groups received rows by their row of a table
"""
