"""The planner: measures a machine, and says what a job on such machines would do.

jobs  real jobs whose rounds are timed
fit  the cost model that tells best what was timed
plan  how many servers a job needs, by simulations of it
tables, distinct  which tables a sample of ids needs; how many different ids more examples have
drawing  a plot of that
commands  `psctl calibrate` and `psctl plan`
"""
