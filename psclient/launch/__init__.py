"""Launchers of whole clusters that are used from Python: `psclient.launch.ray`."""
