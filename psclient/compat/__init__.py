"""Older APIs: `v1` of `tf.compat.v1.distribute`, `contrib` of r1.9's `tf.contrib.distribute`."""

from psclient.compat import contrib, v1

__all__ = ["contrib", "v1"]
