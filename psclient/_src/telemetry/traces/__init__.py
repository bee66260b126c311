"""Traces of workers and of the chief: which spans they make, and of what. Used where traces are on, and only then.

- `worker`: a step, its sections' rounds, and what the process waits for
- `chief`: the chief's part in a round, which is to approve its plan

It imports `pswire.traces` alone. Its spans say names and numbers, and no value of a variable.
"""
