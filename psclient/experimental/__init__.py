"""The names of `tf.distribute.experimental` that are here: `partitioners`."""

from psclient.experimental import partitioners

__all__ = ["partitioners"]
