"""Summaries for TensorBoard: `ps.summary`, with the names of `tf.summary`. tensorboardX writes the event files.

summaries    `scalar`, `histogram`, `image`, `text`
writer       event files, and the default writer
encoding     summaries as protocol buffers, as TensorFlow 2 writes them
png          images as bytes
"""

from psclient.summary.summaries import histogram, image, scalar, text
from psclient.summary.writer import SummaryWriter, create_file_writer, create_noop_writer, flush

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "create_noop_writer",
    "flush",
    "histogram",
    "image",
    "scalar",
    "text",
]
