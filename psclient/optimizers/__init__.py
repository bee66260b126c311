"""Optimizers, with Keras's names, arguments, defaults and formulas; `docs/optimizers.md` shows how to write one."""

from psclient.optimizers import schedules
from psclient.optimizers.base import Optimizer
from psclient.optimizers.keras import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    DelayedNesterov,
    Ftrl,
    Lamb,
    LazyAdam,
    Lion,
    Nadam,
    RMSprop,
    RowwiseAdagrad,
)
from psclient.optimizers.loss_scale import DynamicLossScale

LAMB = Lamb

__all__ = [
    "LAMB",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "DelayedNesterov",
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
