"""The tier of dynamic tables below memory: rows in files that are mapped into memory, of which a bound stays there.

The system reads a page of such a file when it is touched, so that nothing that is computed depends on where a row is.
What is decided here is time: which pages leave memory, and which are read before they are touched.

tier    the files of a server: checks their directory, counts the pages in memory, and chooses those that leave
mapped  one file: its room, its pages, and how often each was touched
paging  the system's calls
"""
