"""What workers and chiefs tell of themselves, and who looks at a job.

exporter    serves the metrics of this process
chief_page  the status page of a chief
observer    connections of who looks at servers, and takes no part in their job
"""
