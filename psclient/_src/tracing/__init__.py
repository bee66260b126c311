"""Turns Python functions of variables into update programs that servers run.

tracer            the array that stands for an operand while a function is traced
recorder          collects the operations into a program
update_function   `@ps.update_function`, and the cache of traces
symbolic_numbers  numbers that become operands of a program instead of constants
guards            detect changes of globals and closures that a trace depends on
hyperparameters   attributes of an object that a trace reads, and that may change between steps
diagnostics       error messages that show the line of the user's function
"""
