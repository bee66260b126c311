"""Optimizers, with Keras's names, arguments, defaults and formulas; `docs/optimizers.md` shows how to write one."""

from psclient.optimizers import schedules
from psclient.optimizers.adam import Adam, Adamax, AdamW, Lamb, Nadam
from psclient.optimizers.adaptive import Adadelta, Adagrad, Ftrl, RMSprop
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
    "Lion",
    "Nadam",
    "Optimizer",
    "RMSprop",
    "schedules",
]
