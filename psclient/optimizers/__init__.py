"""Optimizers, with Keras's names, arguments, defaults and formulas; `docs/optimizers.md` shows how to write one."""

from psclient.optimizers import schedules
from psclient.optimizers.adam import Adam, Adamax, AdamW, Lamb, LazyAdam, Nadam
from psclient.optimizers.adaptive import Adadelta, Adagrad, Ftrl, RMSprop, RowwiseAdagrad
from psclient.optimizers.base import Optimizer
from psclient.optimizers.loss_scale import DynamicLossScale
from psclient.optimizers.sgd import SGD, Lion

LAMB = Lamb

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "DynamicLossScale",
    "Ftrl",
    "Lamb",
    "LazyAdam",
    "Lion",
    "Nadam",
    "Optimizer",
    "RMSprop",
    "RowwiseAdagrad",
    "schedules",
]
