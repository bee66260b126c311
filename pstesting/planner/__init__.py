"""The planner: measures a machine, and says what a job on such machines would do.

jobs   real jobs whose rounds are timed
fit    the cost model that tells best what was timed
"""
