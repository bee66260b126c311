"""Optimizers of `tf.compat.v1.train`, with TensorFlow 1's names, arguments, defaults and formulas.

optimizer     `Optimizer`, the methods that all have: `apply_gradients`, `get_slot`, `variables`
optimizers    the nine optimizers: arguments and defaults
"""

from psclient.compat.v1.train.optimizer import Optimizer
from psclient.compat.v1.train.optimizers import (
    AdadeltaOptimizer,
    AdagradOptimizer,
    AdamOptimizer,
    FtrlOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    ProximalAdagradOptimizer,
    ProximalGradientDescentOptimizer,
    RMSPropOptimizer,
)

__all__ = [
    "AdadeltaOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "ProximalAdagradOptimizer",
    "ProximalGradientDescentOptimizer",
    "RMSPropOptimizer",
]
