"""`python -m psclient` is `psworker`."""

from psclient._src.launch.psworker import main

main()
