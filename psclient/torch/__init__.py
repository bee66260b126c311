"""PyTorch brings its models: parameters on servers, trained by torch's loops. Nothing else here imports `torch`.

optimizer    `Optimizer`: its step is a round
steps        gradients go out, perhaps while backward goes on, and parameters come back
rounds       sends a step's round, mostly without recording it again
gradients    are seen as they come, and copied into buffers that are sent
parameters   names, checks, and parameters as arrays of NumPy
buffers      of a module: each worker's own, or means
groups       of parameters, with hyperparameters of their own
state        `state_dict`, fetched and assigned
local_steps  `DiLoCo` and `LocalSGD`: local steps, and an exchange now and then
scaler       `GradScaler`: an overflow is one for all workers
rows         of tables, as tensors whose gradients go to the servers
embeddings   modules whose rows are on servers
collections  such modules by TorchRec's names
jagged       ids and rows of several features in one tensor, by TorchRec's names
loader       `Loader`: shares batches, and names the next one's ids
"""

from psclient.torch.collections import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from psclient.torch.embeddings import Embedding, EmbeddingBag
from psclient.torch.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from psclient.torch.loader import Loader
from psclient.torch.local_steps import DiLoCo, LocalSGD
from psclient.torch.optimizer import Optimizer
from psclient.torch.scaler import GradScaler

__all__ = [
    "DiLoCo",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "GradScaler",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Loader",
    "LocalSGD",
    "Optimizer",
]
