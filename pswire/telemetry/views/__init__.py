"""Views of a job, made of its servers' answers: for `psctl`, and for the status page. No network here.

looked         the answers of servers
job_view       servers, tasks and problems
rates          what servers do in a second
variable_list  variables, each with its slots
columns        tables that follow from dataclasses
words          sentences that people read
numbers        sizes, times and shapes, as people read them
"""
