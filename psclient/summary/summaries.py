"""Summaries of numbers, distributions, images and texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from psclient._src.arraylike import read
from psclient._src.arrays.devices import to_numpy
from psclient.summary.encoding import buckets_of, bytes_tensor, scalar_summary, tensor_summary
from psclient.summary.png import COLOR_TYPES, encode_png
from psclient.summary.writer import write

DEFAULT_BUCKETS = 30


def scalar(name: str, data: Any, step: int | None = None, description: str | None = None) -> bool:
    """Writes one number to the default writer. In any context.

    In `strategy.run` only the first replica writes.

    Source: `tf.summary.scalar`.

    Args:
        name: name of the curve.
        data: a number, a variable, or an array without dimensions.
        step: the position on the curve; by default that of `as_default`.
        description: Markdown text that TensorBoard shows.

    Returns:
        True if it was written; False without a writer.

    Raises:
        ValueError: there is no step, or the data have dimensions.
    """

    def make() -> Any:
        value = to_numpy(data)
        if value.shape:
            raise ValueError(f"scalar({name!r}) takes one number, not an array of shape {value.shape}; reduce it first")
        return scalar_summary(name, float(value), description)

    return write("scalar", name, step, make)


def histogram(
    name: str, data: Any, step: int | None = None, buckets: int | None = None, description: str | None = None
) -> bool:
    """Writes the distribution of numbers to the default writer. In any context.

    In `strategy.run` only the first replica writes.

    Source: `tf.summary.histogram`.

    Args:
        name: name of the histogram.
        data: numbers, an array of any shape, or a variable; those that are not finite are left out.
        step: as in `scalar`.
        buckets: number of buckets of equal width between the smallest and the largest number; None for 30.
        description: as in `scalar`.

    Returns:
        True if it was written; False without a writer.

    Raises:
        ValueError: there is no step, the number of buckets is not an integer of at least 0, or the data are not real
            numbers.
    """

    def make() -> Any:
        count = DEFAULT_BUCKETS if buckets is None else _whole("histogram", name, "buckets", buckets)
        values = to_numpy(data)
        if np.iscomplexobj(values):
            raise ValueError(f"histogram({name!r}) needs real numbers; pass the real part, or absolute values")
        values = values.astype(np.float64)
        return tensor_summary(name, "histograms", buckets_of(values[np.isfinite(values)], count), description)

    return write("histogram", name, step, make)


def image(name: str, data: Any, step: int | None = None, max_outputs: int = 3, description: str | None = None) -> bool:
    """Writes images to the default writer. In any context.

    In `strategy.run` only the first replica writes.

    Source: `tf.summary.image`.

    Args:
        name: name of the images.
        data: an array of shape (images, height, width, channels), with 1 (gray), 2 (gray and alpha), 3 (red, green,
            blue) or 4 (and alpha) channels: uint8, or floats, which are clipped to 0 to 1.
        step: as in `scalar`.
        max_outputs: the largest number of images that are written, the first ones.
        description: as in `scalar`.

    Returns:
        True if it was written; False without a writer.

    Raises:
        ValueError: there is no step, the data have another shape or dtype, or `max_outputs` is not an integer of at
            least 0.
    """

    def make() -> Any:
        count = _whole("image", name, "max_outputs", max_outputs)
        pixels = to_numpy(data)
        if pixels.ndim != 4 or pixels.shape[-1] not in COLOR_TYPES or not all(pixels.shape[1:3]):
            raise ValueError(
                f"image({name!r}) got an array of shape {pixels.shape}; pass (images, height, width, "
                "channels) with 1 to 4 channels"
            )
        height, width = pixels.shape[1:3]
        encoded = [encode_png(_bytes_of(name, each)) for each in pixels[:count]]
        sizes = [str(width).encode(), str(height).encode()]
        return tensor_summary(name, "images", bytes_tensor([*sizes, *encoded]), description)

    return write("image", name, step, make)


def text(name: str, data: Any, step: int | None = None, description: str | None = None) -> bool:
    """Writes text to the default writer. In any context.

    In `strategy.run` only the first replica writes.

    Source: `tf.summary.text`.

    Args:
        name: name of the text.
        data: a str in Markdown, or UTF-8 bytes; or a nested list or array of them, shown as a table.
        step: as in `scalar`.
        description: as in `scalar`.

    Returns:
        True if it was written; False without a writer.

    Raises:
        ValueError: there is no step.
        TypeError: the data are not text, or have rows of different lengths.
    """

    def make() -> Any:
        words = np.asarray(read(data), object)
        tensor = bytes_tensor([_encoded(name, word) for word in words.ravel()]).reshape(words.shape)
        return tensor_summary(name, "text", tensor, description)

    return write("text", name, step, make)


def _whole(kind: str, name: str, argument: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(f"{kind}({name!r}) has {argument}={value!r}, which must be an integer of at least 0")
    return int(value)


def _bytes_of(name: str, pixels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns an image as uint8; fractions as `tf.image.convert_image_dtype` makes them with `saturate`."""
    if pixels.dtype == np.uint8:
        return pixels
    if not np.issubdtype(pixels.dtype, np.floating):
        raise ValueError(f"image({name!r}) is of {pixels.dtype}; pass uint8, or floating numbers from 0 to 1")
    # A pixel that is not a number becomes black: a picture of what went wrong is better than none.
    return (np.nan_to_num(np.clip(pixels.astype(np.float64), 0, 1)) * 255.5).astype(np.uint8)


def _encoded(name: str, word: object) -> bytes:
    if isinstance(word, str):
        return word.encode()
    if isinstance(word, bytes):
        return word
    raise TypeError(f"text({name!r}) got a {type(word).__name__}; pass a str, or lists of str of equal length")
