"""The status page: what `psctl` knows of a job, for a browser. Loaded only where one is served.

sampler      looks at a job, once for all who watch
status_page  answers requests: who may look, the page, and its changes as they come up
document     the page as a whole, with its style and script
sections     the parts of the page
time_line    lives of sessions as bars
markup       text and tables as HTML
"""
