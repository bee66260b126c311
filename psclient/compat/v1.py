"""`tf.compat.v1.distribute` of r2.2 and r2.3: what `StrategyExtended` had besides."""

from psclient._src.distribute.extended_v1 import MultiStepContext, StrategyExtended

__all__ = ["MultiStepContext", "StrategyExtended"]
