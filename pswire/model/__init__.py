"""The values that clients and servers exchange: frozen dataclasses that know no encoding.

plan     variables, and plans of sections
program  update programs and their verifier
compression  the bytes of compressed contributions, and what they stand for
tensor   dtypes and shapes
tables   dynamic tables: specs, filters, policies
hashing  hashes of their keys, and the canonical bytes of plans
first_values  first values of their rows
rows     ids of rows
chunks   batches that server 0 hands out
log      entries of server 0's log
consistency  how the rounds of a job are made
changes  changes of it
saved    what a server has saved of a checkpoint
status   what a server says of itself
"""
