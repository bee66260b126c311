"""Keras's optimizers: names, arguments and defaults; `rules` has what they keep and compute."""

from __future__ import annotations

from typing import Any, Unpack

from psclient._src.variables.sparse_updates import Sparse
from psclient.optimizers.options import LearningRate, Options
from psclient.optimizers.rules import KERAS, RuleOptimizer


class SGD(RuleOptimizer, rule=KERAS["SGD"]):
    """Gradient descent, with momentum: `m = momentum * m - rate * g; v += m`.

    Source: `keras.optimizers.SGD`; Sutskever et al., "On the importance of initialization and momentum", 2013.

    Args:
        learning_rate: step size.
        momentum: decay of the momentum; 0 for none, without a slot.
        nesterov: True for Nesterov momentum: `v += momentum * m - rate * g`.
        options: as in `Optimizer`.

    Raises:
        ValueError: momentum is not between 0 and 1.

    Examples:
        >>> import psclient as ps
        >>> with ps.MirroredStrategy().scope():
        ...     w = ps.Variable([1.0, 2.0])
        ...     optimizer = ps.optimizers.SGD(learning_rate=0.5, momentum=0.9)
        ...     optimizer.apply_gradients([([1.0, 1.0], w)])
        ...     w.numpy()
        array([0.5, 1.5], dtype=float32)
    """

    momentum: float
    nesterov: bool

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, momentum=momentum, nesterov=nesterov, **options)


class DelayedNesterov(RuleOptimizer, rule=KERAS["DelayedNesterov"]):
    """Gradient descent with Nesterov momentum that moves once in several steps: stable for asynchronous local steps.

    Each step descends by a part of its gradient, `v -= rate * g / delay`. One step in `delay` also moves the momentum
    by the mean of the last `delay` gradients, and descends by it: `m = momentum * m + mean; v -= rate * momentum * m`.

    Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, with c = 0.

    Args:
        learning_rate: step size.
        momentum: decay of the momentum.
        delay: N, the number of steps in which the momentum moves once: with asynchronous workers, their number. A step
            is the arrival of one worker then.
        options: as in `Optimizer`.

    Raises:
        ValueError: momentum is not between 0 and 1, or delay is not a whole number of at least 1.
    """

    momentum: float
    delay: float

    def __init__(
        self, learning_rate: LearningRate, momentum: float = 0.9, delay: int = 4, **options: Unpack[Options]
    ) -> None:
        super().__init__(learning_rate, momentum=momentum, delay=delay, **options)


class Adam(RuleOptimizer, rule=KERAS["Adam"]):
    """Gradient descent by decayed means of gradients and of their squares.

    Source: `keras.optimizers.Adam`; Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, in the form of
    the last paragraph of its section 2.1.

    Args:
        learning_rate: step size.
        beta_1: decay of the first moment.
        beta_2: decay of the second moment.
        epsilon: small number against division by zero.
        amsgrad: True to divide by the largest second moment so far; Reddi et al., 2018.
        options: as in `Optimizer`.

    Raises:
        ValueError: a decay is not at least 0 and less than 1, or epsilon is negative.

    Examples:
        >>> import psclient as ps
        >>> with ps.MirroredStrategy().scope():
        ...     w = ps.Variable([1.0, 2.0])
        ...     optimizer = ps.optimizers.Adam(learning_rate=0.5)
        ...     optimizer.apply_gradients([([1.0, 1.0], w)])
        ...     w.numpy().round(3)
        array([0.5, 1.5], dtype=float32)
    """

    beta_1: float
    beta_2: float
    epsilon: float
    amsgrad: bool

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, amsgrad=amsgrad, **options)


class LazyAdam(Adam):
    """Adam that does not change rows, and their moments, that a sparse gradient does not contain.

    Source: `tfa.optimizers.LazyAdam`. For dense gradients it is `Adam`.

    Args:
        learning_rate: as in `Adam`.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        amsgrad: as in `Adam`.
        sparse: as in `Optimizer`.
        options: as in `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        sparse: Sparse = "lazy",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, sparse=sparse, **options)


class AdamW(Adam):
    """Adam with decoupled weight decay.

    Source: `keras.optimizers.AdamW`; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.

    Args:
        learning_rate: step size.
        weight_decay: as in `Optimizer`.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        amsgrad: as in `Adam`.
        options: as in `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float | None = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay=weight_decay, **options)


class Adamax(RuleOptimizer, rule=KERAS["Adamax"]):
    """Adam with the largest decayed gradient instead of the second moment.

    Source: `keras.optimizers.Adamax`; Kingma and Ba, 2015, section 7.1.

    Args:
        learning_rate: step size.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        options: as in `Optimizer`.
    """

    beta_1: float
    beta_2: float
    epsilon: float

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, **options)


class Nadam(RuleOptimizer, rule=KERAS["Nadam"]):
    """Adam with Nesterov momentum.

    Source: `keras.optimizers.Nadam`; Dozat, "Incorporating Nesterov Momentum into Adam", 2016.

    Args:
        learning_rate: step size.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        options: as in `Optimizer`.
    """

    beta_1: float
    beta_2: float
    epsilon: float

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, **options)


class Lamb(RuleOptimizer, rule=KERAS["Lamb"]):
    """Adam with a step whose length, relative to the variable, is the learning rate.

    Source: `keras.optimizers.Lamb`; You et al., "Large Batch Optimization for Deep Learning", 2020.

    Args:
        learning_rate: step size.
        beta_1: as in `Adam`.
        beta_2: as in `Adam`.
        epsilon: as in `Adam`.
        options: as in `Optimizer`.
    """

    beta_1: float
    beta_2: float
    epsilon: float

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon, **options)


class Adagrad(RuleOptimizer, rule=KERAS["Adagrad"]):
    """Divides gradients by the root of the sum of all squared gradients.

    Source: `keras.optimizers.Adagrad`; Duchi et al., "Adaptive Subgradient Methods", 2011.

    Args:
        learning_rate: step size.
        initial_accumulator_value: initial value of the sum.
        epsilon: small number against division by zero.
        options: as in `Optimizer`.

    Raises:
        ValueError: `initial_accumulator_value` or epsilon is negative.
    """

    initial_accumulator_value: float
    epsilon: float

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, initial_accumulator_value=initial_accumulator_value, epsilon=epsilon, **options)


class RowwiseAdagrad(Adagrad, rule=KERAS["RowwiseAdagrad"]):
    """Adagrad with one sum for each row, of the means of its squared gradients: its state is 1/width of the table.

    Source: `torchrec`'s and FBGEMM's `EXACT_ROWWISE_ADAGRAD`; `fbgemm_gpu.split_embedding_configs`.

    Args:
        learning_rate: as in `Adagrad`.
        initial_accumulator_value: as in `Adagrad`.
        epsilon: as in `Adagrad`.
        options: as in `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.0,
        epsilon: float = 1e-8,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, initial_accumulator_value, epsilon, **options)


class Adadelta(RuleOptimizer, rule=KERAS["Adadelta"]):
    """Divides gradients by the size of recent gradients, and multiplies them by that of recent steps.

    Source: `keras.optimizers.Adadelta`; Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.

    Args:
        learning_rate: step size; 1.0 is the paper's.
        rho: decay of both sizes.
        epsilon: small number against division by zero.
        options: as in `Optimizer`.

    Raises:
        ValueError: the decay is not between 0 and 1, or epsilon is negative.
    """

    rho: float
    epsilon: float

    def __init__(
        self, learning_rate: LearningRate = 0.001, rho: float = 0.95, epsilon: float = 1e-7, **options: Unpack[Options]
    ) -> None:
        super().__init__(learning_rate, rho=rho, epsilon=epsilon, **options)


class RMSprop(RuleOptimizer, rule=KERAS["RMSprop"]):
    """Divides gradients by the root of the mean of recent squared gradients.

    Source: `keras.optimizers.RMSprop`; Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012.

    Args:
        learning_rate: step size.
        rho: decay of the mean.
        momentum: decay of the momentum; 0 for none.
        epsilon: small number against division by zero.
        centered: True to divide by the root of the variance instead of that of the mean of squares.
        options: as in `Optimizer`.

    Raises:
        ValueError: momentum or the decay is not between 0 and 1, or epsilon is negative.
    """

    rho: float
    momentum: float
    epsilon: float
    centered: bool

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, rho=rho, momentum=momentum, epsilon=epsilon, centered=centered, **options)


class Ftrl(RuleOptimizer, rule=KERAS["Ftrl"]):
    """Follow the regularized leader: sparse weights by an L1 penalty.

    Source: `keras.optimizers.Ftrl`; McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013.

    Args:
        learning_rate: step size.
        learning_rate_power: exponent by which it decreases with the sum of squared gradients; at most 0.
        initial_accumulator_value: initial value of that sum.
        l1_regularization_strength: L1 penalty on the weights.
        l2_regularization_strength: L2 penalty on the weights.
        l2_shrinkage_regularization_strength: L2 penalty on the current weights in each step.
        beta: reduces the first learning rates.
        options: as in `Optimizer`.

    Raises:
        ValueError: a number is negative, or the power is positive.
    """

    learning_rate_power: float
    initial_accumulator_value: float
    l1_regularization_strength: float
    l2_regularization_strength: float
    l2_shrinkage_regularization_strength: float
    beta: float

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            learning_rate,
            learning_rate_power=learning_rate_power,
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
            beta=beta,
            **options,
        )


class Lion(RuleOptimizer, rule=KERAS["Lion"]):
    """Updates by the sign of a mixture of gradient and momentum.

    Source: `keras.optimizers.Lion`; Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.

    Args:
        learning_rate: step size; about a tenth of Adam's.
        beta_1: fraction of the momentum in the step.
        beta_2: decay of the momentum.
        options: as in `Optimizer`.

    Raises:
        ValueError: beta_1 is not more than 0 and at most 1, or beta_2 not between 0 and 1.
    """

    beta_1: float
    beta_2: float

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, beta_1=beta_1, beta_2=beta_2, **options)
