"""Update programs as compiled kernels: split into steps, written as source, compiled, launched on pieces.

fusion      splits a program into elementwise steps, one kernel each, and steps that are interpreted
row_steps   splits an update of rows: numbers, then one kernel that goes row by row
codegen     the text of a kernel, from the table of ops: Numba's Python, or CUDA
row_codegen the text of a kernel on rows of tables, which may reduce along each row
functions   what texts call: half precision, sums of rows as NumPy makes them
intrinsics  what LLVM has, and Numba has no word for
compiler    compiles the text in the background and keeps the results; the only place that runs text
machine_code  machine code as bytes: from Numba's LLVM text, and loaded without Numba
kept        machine code in a folder, for other processes
background  one thread that does work in order, and can be left behind
kernels     a server's steps, kernels and threads
launch      runs a kernel over pieces of memory, by several threads
rows        runs a program on selected rows of a variable
replay      makes up updates that rows have missed
closed_forms  what many of these updates make, at once
row_groups  groups received rows by their row of a table
"""
