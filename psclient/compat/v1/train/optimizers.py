"""The optimizers of `tf.compat.v1.train`: arguments, defaults and slots."""

from __future__ import annotations

from psclient import optimizers
from psclient.compat.v1.train.optimizer import Optimizer
from psclient.optimizers.options import LearningRate
from psclient.optimizers.ranges import FROM_0_TO_1, check_number
from psclient.optimizers.rules import TENSORFLOW, RuleOptimizer, kind_of


class GradientDescentOptimizer(Optimizer):
    """Gradient descent: `v -= learning_rate * g`; without slots.

    Source: `tf.compat.v1.train.GradientDescentOptimizer`.

    Args:
        learning_rate: step size: a number, a schedule, or a function without arguments that returns a number, the same
            in all processes.
        use_locking: has no effect.
        name: the optimizer's name.

    Raises:
        TypeError: the learning rate is not a number, schedule or function.
        ValueError: the learning rate is not finite.
    """

    def __init__(self, learning_rate: LearningRate, use_locking: bool = False, name: str = "GradientDescent") -> None:
        super().__init__(optimizers.SGD(learning_rate, name=name), use_locking)


class MomentumOptimizer(Optimizer):
    """Gradient descent with momentum: `m = momentum * m + g; v -= learning_rate * m`; slot `momentum`.

    Source: `tf.compat.v1.train.MomentumOptimizer`.

    Args:
        learning_rate: as in `GradientDescentOptimizer`.
        momentum: decay of the momentum.
        use_locking: has no effect.
        name: prefix of the names of slots.
        use_nesterov: True for Nesterov momentum: `v -= learning_rate * (g + momentum * m)`.

    Raises:
        TypeError: an argument is not a number.
        ValueError: momentum is not between 0 and 1.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        momentum: float,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(_made("Momentum", learning_rate, name, momentum=momentum, nesterov=use_nesterov), use_locking)


class AdamOptimizer(Optimizer):
    """Gradient descent by decayed means of gradients and of their squares; slots `m` and `v`.

    Source: `tf.compat.v1.train.AdamOptimizer`; Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, in
    the form of the last paragraph of its section 2.1.

    Args:
        learning_rate: as in `GradientDescentOptimizer`.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: small number against division by zero; the paper's "epsilon hat".
        use_locking: has no effect.
        name: prefix of the names of slots.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a decay is not at least 0 and less than 1, or epsilon is negative.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        super().__init__(optimizers.Adam(learning_rate, beta1, beta2, epsilon, name=name), use_locking)


class AdagradOptimizer(Optimizer):
    """Divides gradients by the root of the sum of all squared gradients, without an epsilon; slot `accumulator`.

    Source: `tf.compat.v1.train.AdagradOptimizer`; Duchi et al., "Adaptive Subgradient Methods", 2011.

    Args:
        learning_rate: as in `GradientDescentOptimizer`.
        initial_accumulator_value: initial value of the sum.
        use_locking: has no effect.
        name: prefix of the names of slots.

    Raises:
        TypeError: an argument is not a number.
        ValueError: `initial_accumulator_value` is not positive.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        first = {"initial_accumulator_value": initial_accumulator_value, "epsilon": 0.0}
        super().__init__(_made("Adagrad", learning_rate, name, **first), use_locking)


class RMSPropOptimizer(Optimizer):
    """Divides gradients by the root of the mean of recent squared gradients, which begins with 1.

    Slots are `rms`, `momentum`, and `mg` if it is centered.

    Source: `tf.compat.v1.train.RMSPropOptimizer`; Hinton, "Neural Networks for Machine Learning", lecture 6e, 2012.

    Args:
        learning_rate: as in `GradientDescentOptimizer`.
        decay: decay of the mean.
        momentum: decay of the momentum.
        epsilon: small number against division by zero.
        use_locking: has no effect.
        centered: True to divide by the root of the variance instead of that of the mean of squares.
        name: prefix of the names of slots.

    Raises:
        TypeError: an argument is not a number.
        ValueError: momentum or the decay is not between 0 and 1, or epsilon is negative.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        rest = {"momentum": momentum, "epsilon": epsilon, "centered": centered}
        rho = check_number("decay", decay, FROM_0_TO_1)
        super().__init__(_made("RMSProp", learning_rate, name, rho=rho, **rest), use_locking)


class AdadeltaOptimizer(Optimizer):
    """Divides gradients by the size of recent gradients, and multiplies them by that of recent steps.

    Slots are `accum` and `accum_update`.

    Source: `tf.compat.v1.train.AdadeltaOptimizer`; Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012.

    Args:
        learning_rate: as in `GradientDescentOptimizer`; 1.0 is the paper's.
        rho: decay of both sizes.
        epsilon: small number against division by zero.
        use_locking: has no effect.
        name: prefix of the names of slots.

    Raises:
        TypeError: an argument is not a number.
        ValueError: the decay is not between 0 and 1, or epsilon is negative.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
    ) -> None:
        super().__init__(_made("Adadelta", learning_rate, name, rho=rho, epsilon=epsilon), use_locking)


class FtrlOptimizer(Optimizer):
    """Follow the regularized leader: sparse weights by an L1 penalty; slots `accum` and `linear`.

    Source: `tf.compat.v1.train.FtrlOptimizer`; McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013.

    Args:
        learning_rate: as in `GradientDescentOptimizer`.
        learning_rate_power: exponent by which it decreases with the sum of squared gradients; at most 0.
        initial_accumulator_value: initial value of that sum.
        l1_regularization_strength: L1 penalty on the weights.
        l2_regularization_strength: L2 penalty on the weights.
        use_locking: has no effect.
        name: prefix of the names of slots.
        accum_name: has no effect: slots are found by `get_slot`.
        linear_name: has no effect: slots are found by `get_slot`.
        l2_shrinkage_regularization_strength: L2 penalty on the current weights in each step.
        beta: reduces the first learning rates; None is 0.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a number is negative, or the power is positive.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float | None = None,
    ) -> None:
        rule = _made(
            "Ftrl",
            learning_rate,
            name,
            learning_rate_power=learning_rate_power,
            initial_accumulator_value=initial_accumulator_value,
            l1_regularization_strength=l1_regularization_strength,
            l2_regularization_strength=l2_regularization_strength,
            l2_shrinkage_regularization_strength=l2_shrinkage_regularization_strength,
            beta=0.0 if beta is None else beta,
        )
        super().__init__(rule, use_locking)


class ProximalGradientDescentOptimizer(Optimizer):
    """Gradient descent, with weights that are shrunk after each step; without slots.

    Source: `tf.compat.v1.train.ProximalGradientDescentOptimizer`; Duchi and Singer, "Efficient Online and Batch
    Learning Using Forward Backward Splitting", 2009.

    Args:
        learning_rate: as in `GradientDescentOptimizer`.
        l1_regularization_strength: L1 penalty on the weights; small weights become 0.
        l2_regularization_strength: L2 penalty on the weights.
        use_locking: has no effect.
        name: the optimizer's name.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a penalty is negative.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "ProximalGradientDescent",
    ) -> None:
        penalties = {
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
        }
        super().__init__(_made("ProximalGradientDescent", learning_rate, name, **penalties), use_locking)


class ProximalAdagradOptimizer(Optimizer):
    """Adagrad, with weights that are shrunk after each step; slot `accumulator`.

    Source: `tf.compat.v1.train.ProximalAdagradOptimizer`; Duchi and Singer, 2009, with the steps of Duchi et al., 2011.

    Args:
        learning_rate: as in `GradientDescentOptimizer`.
        initial_accumulator_value: initial value of the sum of squared gradients.
        l1_regularization_strength: L1 penalty on the weights; small weights become 0.
        l2_regularization_strength: L2 penalty on the weights.
        use_locking: has no effect.
        name: prefix of the names of slots.

    Raises:
        TypeError: an argument is not a number.
        ValueError: a penalty is negative, or `initial_accumulator_value` is not positive.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "ProximalAdagrad",
    ) -> None:
        numbers = {
            "initial_accumulator_value": initial_accumulator_value,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
        }
        super().__init__(_made("ProximalAdagrad", learning_rate, name, **numbers), use_locking)


def _made(rule: str, learning_rate: LearningRate, name: str, **numbers: float) -> RuleOptimizer:
    return kind_of(TENSORFLOW[rule], f"{rule}Optimizer")(learning_rate, name=name, **numbers)
