"""The supported names of `tf.distribute.experimental`: `partitioners`."""

from psclient.experimental import partitioners

__all__ = ["partitioners"]
