"""Summaries as protocol buffers, as TensorFlow 2 writes them: a tensor, and the name of TensorBoard's plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def scalar_summary(name: str, value: float, description: str | None) -> Any:
    """Returns the summary of one number.

    Args:
        name: name of the curve.
        value: the number.
        description: a text in Markdown, or None.
    """
    from tensorboardX.summary import scalar

    return scalar(name, value, summary_description=description or "")


def tensor_summary(
    name: str, plugin: str, tensor: npt.NDArray[np.float64] | npt.NDArray[np.object_], description: str | None
) -> Any:
    """Returns a summary that a plugin of TensorBoard shows.

    Args:
        name: the summary's name.
        plugin: the plugin's name.
        tensor: float64, or objects that are bytes.
        description: a text in Markdown, or None.
    """
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboardX.proto.tensor_pb2 import TensorProto
    from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in tensor.shape])
    if tensor.dtype == np.float64:
        proto = TensorProto(dtype="DT_DOUBLE", tensor_shape=shape, tensor_content=tensor.astype("<f8").tobytes())
    else:
        proto = TensorProto(dtype="DT_STRING", tensor_shape=shape, string_val=tensor.ravel().tolist())
    of_plugin = SummaryMetadata.PluginData(plugin_name=plugin)
    metadata = SummaryMetadata(plugin_data=of_plugin, summary_description=description or "")
    return Summary(value=[Summary.Value(tag=name, tensor=proto, metadata=metadata)])


def bytes_tensor(items: Sequence[bytes]) -> npt.NDArray[np.object_]:
    """Returns a tensor of one dimension with these items; NumPy's own arrays of bytes would lose zeros at their end."""
    tensor = np.empty(len(items), object)
    tensor[:] = items
    return tensor


def buckets_of(values: npt.NDArray[np.float64], buckets: int) -> npt.NDArray[np.float64]:
    """Returns how many values are in each of a number of buckets of one width.

    Source: TensorBoard's histogram plugin, `summary_v2`.

    Args:
        values: finite numbers, of any shape.
        buckets: number of buckets, from 0.

    Returns:
        An array of shape (buckets, 3): the left edge of each bucket, the right one, and the number of values. Where
        all values are equal, all edges are, and the last bucket has them; without values all is 0.
    """
    if not values.size or not buckets:
        return np.zeros((buckets, 3))
    low, high = values.min(), values.max()
    edges = np.linspace(low, high, buckets + 1)
    if low == high:
        places = np.full(values.size, buckets - 1)
    else:
        # Of the range and not of a bucket's width: the least range there is has a width of 0.
        places = np.minimum((values.ravel() - low) / (high - low) * buckets, buckets - 1).astype(np.int64)
    counts = np.bincount(places, minlength=buckets)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)
