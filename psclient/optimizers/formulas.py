"""The formulas of update rules, functions that are traced and run on the servers; `rules` says which rule has which.

Each takes the optimizer, whose attributes are the hyperparameters; the variable; the gradient; the number of steps with
this one included; and the slots in the order of the rule, None for one that it is made without. It assigns the variable
and the slots. Operations and their order are those of the source, so that results agree to the last bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from psclient._src.arrays.devices import Value

# ---- By the gradient, or by its sign ----


def descent(o: Any, v: Value, g: Value, t: Value, m: Value) -> None:
    """Keras: momentum holds steps, so that a new learning rate is for the gradients from here on."""
    step = o.learning_rate * g
    if m is not None:
        m.assign(o.momentum * m - step)
        step = step - o.momentum * m if o.nesterov else -m
    v.assign_sub(step)


def heavy_ball(o: Any, v: Value, g: Value, t: Value, m: Value) -> None:
    """PyTorch, optax, TensorFlow 1: momentum holds gradients, of which PyTorch dampens all but the first."""
    if m is None:
        v.assign_sub(o.learning_rate * g)
        return
    dampening = getattr(o, "dampening", 0.0)
    now = o.momentum * m + ((1 - dampening) * g if dampening else g)
    m.assign(np.where(t == 1, g, now) if dampening else now)
    v.assign_sub(o.learning_rate * (g + o.momentum * m if o.nesterov else m))


def delayed_nesterov(o: Any, v: Value, g: Value, t: Value, total: Value, m: Value) -> None:
    """Liu et al., arXiv 2401.09135, with c = 0: one gradient in `delay` moves the momentum, by the mean of so many."""
    whole, due = total + g, t % o.delay == 0
    now = o.momentum * m + whole / o.delay
    m.assign(np.where(due, now, m))
    total.assign(np.where(due, 0.0, whole))
    v.assign_sub(o.learning_rate * (np.where(due, o.momentum * now, 0.0) + g / o.delay))


def lion(o: Any, v: Value, g: Value, t: Value, m: Value) -> None:
    """Keras."""
    v.assign_sub(o.learning_rate * np.sign(o.beta_1 * m + (1 - o.beta_1) * g))
    m.assign(o.beta_2 * m + (1 - o.beta_2) * g)


def proximal_descent(o: Any, v: Value, g: Value, t: Value) -> None:
    """TensorFlow 1: weights are shrunk after the step."""
    _shrink(o, v, g, o.learning_rate)


# ---- By moments of the gradient ----


def adam(o: Any, v: Value, g: Value, t: Value, m: Value, s: Value, most: Value = None) -> None:
    """Keras, TensorFlow 1, PyTorch's SparseAdam: the paper's "epsilon hat" is added to a root that is not corrected."""
    first, second = _corrections(o, t)
    rate = (o.learning_rate * np.sqrt(second) / first).astype(g.dtype)
    _move(o, g, m, s)
    if most is not None:
        s = most.assign(np.maximum(most, s))
    v.assign_sub(rate * m / (np.sqrt(s) + o.epsilon))


def adam_of_torch(o: Any, v: Value, g: Value, t: Value, m: Value, s: Value, most: Value) -> None:
    """PyTorch: epsilon is added to the corrected root."""
    t = t.astype(np.float64)
    _move_of_torch(o, g, m, s)
    if most is not None:
        most.assign(np.maximum(most, s))
        s = most
    rate = (o.learning_rate / (1 - o.beta_1**t)).astype(g.dtype)
    root = np.sqrt(1 - o.beta_2**t).astype(g.dtype)
    v.assign_sub(rate * (m / (np.sqrt(s) / root + o.epsilon)))


def adam_of_optax(o: Any, v: Value, g: Value, t: Value, m: Value, s: Value) -> None:
    """optax: as PyTorch, with corrections in the gradient's precision, where 1 - 0.999 has an error of 1e-5."""
    first, size = _corrected_of_optax(o, g, t.astype(g.dtype), m, s)
    step = first / size
    if o._decaying:  # a step of its own would be rounded twice, each time alike
        step = step + o.weight_decay * v.astype(g.dtype)
    v.assign_sub(o.learning_rate * step)


def _corrected_of_optax(o: Any, g: Value, t: Value, m: Value, s: Value) -> tuple[Value, Value]:
    """Moves both moments, and returns the first one and the root of the second one, corrected."""
    m.assign(o.b1 * m + (1 - o.b1) * g)
    s.assign(o.b2 * s + (1 - o.b2) * g * g)
    now, next, second = 1 - o.b1**t, 1 - o.b1 ** (t + 1), 1 - o.b2**t
    first = o.b1 * m / next + (1 - o.b1) * g / now if o.nesterov else m / now
    return first, np.sqrt(s / second + o.eps_root) + o.eps


def radam_of_torch(o: Any, v: Value, g: Value, t: Value, m: Value, s: Value) -> None:
    """PyTorch: epsilon is added to the root of a moment that is not corrected."""
    first, second = _corrections(o, t)
    length, factor = _rectification(o.beta_2, t.astype(np.float64), 5.0)
    _move_of_torch(o, g, m, s)
    known = length > 5.0
    rate = o.learning_rate / first * np.where(known, factor * np.sqrt(second), 1.0)
    v.assign_sub(rate.astype(g.dtype) * (m / np.where(known, np.sqrt(s) + o.epsilon, 1.0)))


def radam_of_optax(o: Any, v: Value, g: Value, t: Value, m: Value, s: Value) -> None:
    """optax: with the corrections of its Adam."""
    t = t.astype(g.dtype)
    length, factor = _rectification(o.b2, t, o.threshold)
    first, size = _corrected_of_optax(o, g, t, m, s)
    v.assign_sub(o.learning_rate * np.where(length >= o.threshold, factor * first / size, first))


def _rectification(beta_2: Value, t: Value, least: Value) -> tuple[Value, Value]:
    """Returns of how many gradients the second moment is a mean, and the factor of a step that is divided by its root.

    Source: Liu et al., "On the Variance of the Adaptive Learning Rate and Beyond", 2020.

    Args:
        beta_2: decay of the second moment.
        t: number of steps, in the precision of the computation.
        least: the number of gradients from which on the factor is used.
    """
    power, limit = beta_2**t, 2 / (1 - beta_2) - 1
    length = limit - 2 * t * power / (1 - power)
    most, now = np.maximum(limit, least), np.maximum(length, least)  # else a factor that is not used may be no number
    return length, np.sqrt((now - 4) * (now - 2) * most / ((most - 4) * (most - 2) * now))


def adamax(o: Any, v: Value, g: Value, t: Value, m: Value, u: Value) -> None:
    """Keras."""
    rate = (o.learning_rate / _corrections(o, t)[0]).astype(g.dtype)
    m.assign_add((1 - o.beta_1) * (g - m))
    u.assign(np.maximum(o.beta_2 * u, np.abs(g)))
    v.assign_sub(rate * m / (u + o.epsilon))


def adamax_of_torch(o: Any, v: Value, g: Value, t: Value, m: Value, u: Value) -> None:
    """PyTorch: epsilon is added to each gradient's size."""
    rate = (o.learning_rate / _corrections(o, t)[0]).astype(g.dtype)
    m.assign_add((1 - o.beta_1) * (g - m))
    u.assign(np.maximum(o.beta_2 * u, np.abs(g) + o.epsilon))
    v.assign_sub(rate * (m / u))


def adamax_of_optax(o: Any, v: Value, g: Value, t: Value, m: Value, u: Value) -> None:
    """optax: as PyTorch, with the correction in the gradient's precision."""
    m.assign(o.b1 * m + (1 - o.b1) * g)
    u.assign(np.maximum(o.b2 * u, np.abs(g) + o.eps))
    v.assign_sub(o.learning_rate * (m / (1 - o.b1 ** t.astype(g.dtype)) / u))


def nadam(o: Any, v: Value, g: Value, t: Value, m: Value, s: Value, product: Value) -> None:
    """Keras; `nadam_product` has moved the product of the momenta."""
    step = t.astype(np.float64)
    now, next = _nadam_momentum(o, step), _nadam_momentum(o, step + 1)
    of_m, of_g = next / (1 - product * next), (1 - now) / (1 - product)
    _move(o, g, m, s)
    ahead = of_m.astype(g.dtype) * m + of_g.astype(g.dtype) * g
    second = _corrections(o, t)[1].astype(g.dtype)
    v.assign_sub(o.learning_rate * ahead / (np.sqrt(s / second) + o.epsilon))


def nadam_product(o: Any, product: Value, t: Value) -> Value:
    """Returns the product of the momenta of all steps, this one included."""
    return product * _nadam_momentum(o, t.astype(np.float64))


def _nadam_momentum(o: Any, step: Value) -> Value:
    return o.beta_1 * (1 - 0.5 * 0.96**step)


def nadam_of_torch(o: Any, v: Value, g: Value, t: Value, m: Value, s: Value, product: Value) -> None:
    """PyTorch: momenta change more slowly; `nadam_product_of_torch` has moved their product."""
    step = t.astype(np.float64)
    now, next = _nadam_momentum(o, step * o.momentum_decay), _nadam_momentum(o, (step + 1) * o.momentum_decay)
    of_m, of_g = o.learning_rate * next / (1 - product * next), o.learning_rate * (1 - now) / (1 - product)
    _move_of_torch(o, g, m, s)
    size = np.sqrt(s / _corrections(o, t)[1].astype(g.dtype)) + o.epsilon
    v.assign_sub(of_g.astype(g.dtype) * (g / size))
    v.assign_sub(of_m.astype(g.dtype) * (m / size))


def nadam_product_of_torch(o: Any, product: Value, t: Value) -> Value:
    """Returns the product of the momenta of all steps, this one included."""
    return product * _nadam_momentum(o, t.astype(np.float64) * o.momentum_decay)


def lamb(o: Any, v: Value, g: Value, t: Value, m: Value, s: Value) -> None:
    """Keras: the length of a step, relative to the variable, is the learning rate."""
    first, second = (correction.astype(g.dtype) for correction in _corrections(o, t))
    _move(o, g, m, s)
    step = (m / first) / (np.sqrt(s / second) + o.epsilon)
    length, own = (np.sqrt(np.sum(np.square(x))) for x in (v.astype(g.dtype), step))
    known = np.logical_and(length > 0, own > 0)
    ratio = np.where(known, length / np.where(known, own, 1.0), 1.0)
    v.assign_sub(o.learning_rate * ratio * step)


# ---- By the size that gradients have had ----


def adagrad(o: Any, v: Value, g: Value, t: Value, total: Value) -> None:
    """Keras, TensorFlow 1."""
    total.assign_add(g * g)
    v.assign_sub(o.learning_rate * g / np.sqrt(total + o.epsilon))


def adagrad_of_rows(o: Any, v: Value, g: Value, t: Value, total: Value) -> None:
    """FBGEMM: one sum for each row, of the means of its squared gradients."""
    axes = tuple(range(1, len(g.shape)))
    squares = np.square(g)
    total.assign_add(np.mean(squares, axis=axes, keepdims=True) if axes else squares)
    v.assign_sub(o.learning_rate * g / (np.sqrt(total) + o.epsilon))


def adagrad_of_torch(o: Any, v: Value, g: Value, t: Value, total: Value) -> None:
    """PyTorch."""
    total.assign_add(g * g)
    rate = o.learning_rate
    if o.lr_decay:
        rate = (rate / (1 + (t.astype(np.float64) - 1) * o.lr_decay)).astype(g.dtype)
    v.assign_sub(rate * (g / (np.sqrt(total) + o.epsilon)))


def adagrad_of_optax(o: Any, v: Value, g: Value, t: Value, total: Value) -> None:
    """optax: no step where the sum is 0."""
    total.assign_add(g * g)
    size = np.where(total > 0, total + o.eps, 1.0)
    v.assign_sub(o.learning_rate * g / np.sqrt(size))


def proximal_adagrad(o: Any, v: Value, g: Value, t: Value, total: Value) -> None:
    """TensorFlow 1: weights are shrunk after the step."""
    total.assign_add(g * g)
    _shrink(o, v, g, o.learning_rate / np.sqrt(total))


def adadelta(o: Any, v: Value, g: Value, t: Value, gradients: Value, steps: Value) -> None:
    """Keras, TensorFlow 1, PyTorch."""
    _adadelta(o, v, g, o.epsilon, gradients, steps)


def adadelta_of_optax(o: Any, v: Value, g: Value, t: Value, gradients: Value, steps: Value) -> None:
    """optax: weights decay by the gradient."""
    _adadelta(o, v, g + o.weight_decay * v.astype(g.dtype) if o._decaying else g, o.eps, gradients, steps)


def _adadelta(o: Any, v: Value, g: Value, epsilon: Value, gradients: Value, steps: Value) -> None:
    gradients.assign(o.rho * gradients + (1 - o.rho) * g * g)
    step = np.sqrt(steps + epsilon) / np.sqrt(gradients + epsilon) * g
    steps.assign(o.rho * steps + (1 - o.rho) * step * step)
    v.assign_sub(o.learning_rate * step)


def rmsprop(o: Any, v: Value, g: Value, t: Value, squares: Value, mean: Value, m: Value) -> None:
    """Keras, TensorFlow 1: epsilon is under the root, and momentum holds steps."""
    squares.assign(o.rho * squares + (1 - o.rho) * g * g)
    size = squares.value()
    if mean is not None:
        mean.assign(o.rho * mean + (1 - o.rho) * g)
        size = size - mean * mean
    step = o.learning_rate * g / np.sqrt(size + o.epsilon)
    v.assign_sub(step if m is None else m.assign(o.momentum * m + step).value())


def rmsprop_of_torch(o: Any, v: Value, g: Value, t: Value, squares: Value, m: Value, mean: Value) -> None:
    """PyTorch: epsilon is beside the root, and momentum holds gradients."""
    squares.assign(o.alpha * squares + (1 - o.alpha) * g * g)
    size = squares.value()
    if mean is not None:
        mean.assign_add((1 - o.alpha) * (g - mean))
        size = size - mean * mean
    step = g / (np.sqrt(size) + o.epsilon)
    if m is not None:
        m.assign(o.momentum * m + step)
        step = m
    v.assign_sub(o.learning_rate * step)


def ftrl(o: Any, v: Value, g: Value, t: Value, total: Value, linear: Value) -> None:
    """Keras, TensorFlow 1."""
    l1, l2 = o.l1_regularization_strength, o.l2_regularization_strength
    rate, weights = o.learning_rate, v.astype(g.dtype)
    before = total.value() ** -o.learning_rate_power
    total.assign_add(g * g)
    after = total.value() ** -o.learning_rate_power
    linear.assign_add(g + 2 * o.l2_shrinkage_regularization_strength * weights - (after - before) / rate * weights)
    quadratic = after / rate + 2 * (l2 + o.beta / (2 * rate))
    v.assign((np.clip(linear, -l1, l1) - linear) / quadratic)


# ---- What they share ----


def _move(o: Any, g: Value, m: Value, s: Value) -> None:
    """Moves both moments towards the gradient and its square."""
    m.assign_add((1 - o.beta_1) * (g - m))
    s.assign_add((1 - o.beta_2) * (g * g - s))


def _move_of_torch(o: Any, g: Value, m: Value, s: Value) -> None:
    """As `_move`, with PyTorch's operations for the second moment."""
    m.assign_add((1 - o.beta_1) * (g - m))
    s.assign(o.beta_2 * s + (1 - o.beta_2) * g * g)


def _corrections(o: Any, t: Value) -> tuple[Value, Value]:
    """Returns `1 - beta_1 ** t` and `1 - beta_2 ** t`, float64: in half precision 0.999 is 1."""
    t = t.astype(np.float64)
    return 1 - o.beta_1**t, 1 - o.beta_2**t


def _shrink(o: Any, v: Value, g: Value, rate: Value) -> None:
    """Makes a step to the weights that are nearest under both penalties; Duchi and Singer, "FOBOS", 2009."""
    x, l1, l2 = v.astype(g.dtype) - rate * g, rate * o.l1_regularization_strength, rate * o.l2_regularization_strength
    v.assign(np.sign(x) * np.maximum(np.abs(x) - l1, 0.0) / (1.0 + l2))
