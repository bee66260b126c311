"""Training of JAX's models on parameter servers; `import psclient.jax as psj`.

    state = psj.TrainState.create(apply_fn=model.apply, params=params, tx=psj.optimizers.adam(1e-3), strategy=strategy)
    for batch in psj.Loader(data, strategy=strategy):
        loss, grads = step(state.params, batch)         # compiled by jax.jit, and pure
        state = state.apply_gradients(grads=grads)      # a round: the mean over all workers, and a step on the servers

Nothing else of this package imports JAX. Needs the extra `jax`.

state       `TrainState`, with the face of flax's
parameters  the leaves of a pytree as variables: reads, steps, assignments
optimizers  sgd, adam, adamw, adagrad by optax's formulas
rows        rows of embedding tables, in few shapes
bags        bags of these rows
loading     batches, shared among all workers
modules     modules of Flax NNX
local_steps `DiLoCo` and `LocalSGD`: local steps, and an exchange now and then
trees       names, dtypes and structures of pytrees
arrays      between NumPy and JAX: what is copied
"""

from psclient.jax import optimizers
from psclient.jax.bags import embedding, embedding_bag
from psclient.jax.loading import Loader
from psclient.jax.local_steps import DiLoCo, LocalSGD
from psclient.jax.modules import Optimizer
from psclient.jax.rows import JoinedRows, lookup
from psclient.jax.state import TrainState

__all__ = [
    "DiLoCo",
    "JoinedRows",
    "Loader",
    "LocalSGD",
    "Optimizer",
    "TrainState",
    "embedding",
    "embedding_bag",
    "lookup",
    "optimizers",
]
