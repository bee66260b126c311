"""Update programs as compiled kernels: split into steps, written as source, compiled, launched on pieces.

steps       a program cut into elementwise steps, one kernel each, and steps that are interpreted
source      the text of a kernel, from the table of ops: Numba's Python, or CUDA
compiled    compiles the text in the background and remembers what is compiled; the only place that runs text
background  one thread that does work in order, and can be left behind
kernels     what a server keeps of all this
launch      runs a kernel over pieces of memory, by several threads
rows        runs a program on selected rows of a variable
groups      which of the rows that came belong to the same row of a table
"""
