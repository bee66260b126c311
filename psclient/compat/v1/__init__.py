"""`tf.compat.v1`: what `StrategyExtended` of r2.2 and r2.3 had besides, and `train`, the optimizers."""

from psclient._src.distribute.extended_v1 import MultiStepContext, StrategyExtended
from psclient.compat.v1 import train

__all__ = ["MultiStepContext", "StrategyExtended", "train"]
