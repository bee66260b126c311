"""The planner: measures a machine, and says what a job on such machines would do.

jobs  real jobs whose rounds are timed
fit  the cost model that tells best what was timed
plan  how many servers a job needs, by simulations of it
drawing  a plot of that
commands  `psctl calibrate` and `psctl plan`
"""
