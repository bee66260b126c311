"""Compresses gradients: for `ps.Variable(..., compression=)` and `ParameterServerStrategy(compression=...)`.

    strategy = ps.ParameterServerStrategy(compression=ps.compression.BFloat16())
    with strategy.scope():
        w = ps.Variable(np.zeros((1000, 1000)), compression=ps.compression.TopK(0.01))
        b = ps.Variable(np.zeros(1000), compression=False)

A compressed contribution is less exact than the original. The difference, the residual, stays in the process and is
added to its next contribution to the variable (error feedback): nothing is lost, it only arrives later. Source: Seide
et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.
"""

from psclient._src.variables.compression import BFloat16, Compression, Float16, Int4, Int8, TopK

__all__ = ["BFloat16", "Compression", "Float16", "Int4", "Int8", "TopK"]
