"""Losses of examples: as Keras computes them, without overflow, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import psclient as ps

L = ps.losses
LOGITS = np.array([[2.0, -1.0, 0.5], [0.0, 3.0, -2.0], [-1.5, 0.25, 0.75], [40.0, -40.0, 0.0]])
SHARES = np.array([[0.7, 0.2, 0.1], [0.0, 1.0, 0.0], [0.3, 0.3, 0.6], [0.05, 0.9, 0.05]])
"""The third row adds up to more than 1."""
SINGLE = np.array([[0.9, 0.1, 0.5], [0.0, 1.0, 0.2], [0.3, 0.6, 0.7], [0.5, 0.5, 0.01]])
LABELS = np.array([[1.0, 0, 0], [0.25, 0.5, 0.25], [0, 0, 1], [0, 1, 0]])
CLASSES = np.array([0, 1, 2, 1])

CASES = {
    "mse": lambda: L.mean_squared_error(LABELS, LOGITS),
    "bce": lambda: L.binary_crossentropy(LABELS, SINGLE),
    "bce logits": lambda: L.binary_crossentropy(LABELS, LOGITS, from_logits=True),
    "bce smoothed": lambda: L.binary_crossentropy(LABELS, LOGITS, from_logits=True, label_smoothing=0.25),
    "cce": lambda: L.categorical_crossentropy(LABELS, SHARES),
    "cce logits": lambda: L.categorical_crossentropy(LABELS, LOGITS, from_logits=True),
    "cce smoothed": lambda: L.categorical_crossentropy(LABELS, SHARES, label_smoothing=0.25),
    "scce": lambda: L.sparse_categorical_crossentropy(CLASSES, SHARES),
    "scce logits": lambda: L.sparse_categorical_crossentropy(CLASSES, LOGITS, from_logits=True),
}
KERAS = {
    "mse": [0.75, 3.7916666666666665, 0.7916666666666666, 1093.6666666666667],
    "bce": [0.3012894039585326, 4.2194296683587025, 0.5432135399172067, 0.465448232324464],
    "bce logits": [0.471422227580434, 0.9562208477255533, 0.4714079013254986, 26.897715726853317],
    "bce smoothed": [0.5755888942471007, 0.9978875143922199, 0.554741234658832, 23.56438239351998],
    "cce": [0.3566749439387323, 8.059047875479163, 0.6931471805599453, 0.10536051565782628],
    "cce logits": [0.24131129665715703, 2.0549852353771474, 0.5376213214337139, 80.0],
    "cce smoothed": [0.6232310370679557, 8.730635190102426, 0.8086717106532695, 0.5870891419738536],
    "scce": [0.35667494393873256, 2.0000000010078654e-07, 0.6931471805599453, 0.10536051565782635],
    "scce logits": [0.24131129665715703, 0.05498523537714723, 0.5376213214337139, 80.0],
}
"""What the functions of `keras.losses` of these names give: Keras 3.15.1 on TensorFlow 2.21.0, floatx float64."""


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_keras(name):
    """A value for each example."""
    np.testing.assert_allclose(CASES[name](), KERAS[name], rtol=1e-9)


@pytest.mark.parametrize("loss", [L.binary_crossentropy, L.categorical_crossentropy])
def test_logits_are_as_their_probabilities(loss):
    """Which `from_logits` says to compute first."""
    small = LOGITS[:3]
    shares = 1 / (1 + np.exp(-small))
    if loss is L.categorical_crossentropy:
        shares = np.exp(small) / np.exp(small).sum(-1, keepdims=True)
    np.testing.assert_allclose(loss(LABELS[:3], small, from_logits=True), loss(LABELS[:3], shares), rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_great_logits_do_not_overflow(dtype):
    """The loss is as great as the logits are; no warning, which would be an error here."""
    logits = np.array([[30000.0, -30000.0], [-30000.0, 30000.0]], dtype)
    great = 60000 if dtype is not ml_dtypes.bfloat16 else 2 * float(logits[0, 0])
    with np.errstate(all="raise", under="ignore"):
        sparse = L.sparse_categorical_crossentropy(np.array([0, 0]), logits, from_logits=True)
        dense = L.categorical_crossentropy(np.array([[1, 0], [1, 0]]), logits, from_logits=True)
        binary = L.binary_crossentropy(np.array([[1, 0], [1, 0]]), logits, from_logits=True)
    for found, expected in ((sparse, great), (dense, great), (binary, great / 2)):
        assert found.dtype == np.float32
        assert found.tolist() == [0.0, expected]


def test_probabilities_of_0_and_1_are_finite():
    """As if they were 1e-7 away."""
    certain = np.array([[1.0, 0.0]])
    wrong = np.array([[0.0, 1.0]])
    for loss in (L.binary_crossentropy, L.categorical_crossentropy):
        assert float(loss(wrong, certain)[0]) == pytest.approx(-np.log(1e-7))
        assert float(loss(certain, certain)[0]) == pytest.approx(1e-7)
    assert float(L.sparse_categorical_crossentropy([1], certain)[0]) == pytest.approx(-np.log(1e-7), rel=1e-6)


def test_a_class_that_is_ruled_out_costs_nothing_unless_it_is_the_label():
    """Its logit is minus infinity, as of a mask."""
    logits = np.array([[0.0, 0.0, -np.inf]])
    for found in (
        L.categorical_crossentropy(np.array([[1.0, 0.0, 0.0]]), logits, from_logits=True),
        L.sparse_categorical_crossentropy(np.array([0]), logits, from_logits=True),
    ):
        assert float(found[0]) == pytest.approx(np.log(2))
    assert L.sparse_categorical_crossentropy(np.array([2]), logits, from_logits=True).tolist() == [np.inf]


def test_labels_may_lack_the_last_dimension():
    """Where predictions have one of size 1; and numbers of classes may have it."""
    np.testing.assert_array_equal(L.mean_squared_error([1.0, 2.0], [[3.0], [5.0]]), [4.0, 9.0])
    np.testing.assert_array_equal(L.mean_squared_error([[1.0], [2.0]], [3.0, 5.0]), [4.0, 9.0])
    deep = L.mean_squared_error(np.ones((2, 3, 1)), np.zeros((2, 3)))
    assert deep.tolist() == [1.0, 1.0]
    labels = CLASSES.astype("float32")[:, None]
    np.testing.assert_allclose(L.sparse_categorical_crossentropy(labels, SHARES), KERAS["scce"], rtol=1e-9)


def test_any_number_of_dimensions_before_the_last():
    """Words of sentences, none of them, and variables."""
    for shape in ((2, 2), (4, 1), (1, 2, 2)):
        found = L.sparse_categorical_crossentropy(CLASSES.reshape(shape), LOGITS.reshape(*shape, 3), from_logits=True)
        np.testing.assert_allclose(found, np.reshape(KERAS["scce logits"], shape))
    assert L.sparse_categorical_crossentropy(np.zeros(0, int), np.zeros((0, 3))).shape == (0,)
    for loss in (L.mean_squared_error, L.binary_crossentropy, L.categorical_crossentropy):
        assert loss(np.zeros((0, 3)), np.zeros((0, 3))).shape == (0,)
    np.testing.assert_allclose(L.mean_squared_error(ps.Variable(LABELS), ps.Variable(LOGITS)), KERAS["mse"])


def test_shapes_that_do_not_fit_are_refused():
    """And never broadcast: the error has both."""
    for loss in (L.mean_squared_error, L.binary_crossentropy, L.categorical_crossentropy):
        with pytest.raises(ValueError, match=r"labels of shape \(3,\) and predictions of shape \(3, 3\) differ"):
            loss(np.ones(3), np.ones((3, 3)))
        with pytest.raises(ValueError, match="a number has none"):
            loss(1.0, 0.5)
    for labels in (np.zeros(3, int), np.zeros((4, 3), int), 0):
        with pytest.raises(ValueError, match=r"do not fit predictions of shape \(4, 3\); give the number of a class"):
            L.sparse_categorical_crossentropy(labels, LOGITS)
    with pytest.raises(ValueError, match=r"predictions of shape \(\)"):
        L.sparse_categorical_crossentropy(0, 0.5)


@pytest.mark.parametrize("wrong", [-1, 3, 0.5, np.nan])
def test_a_label_is_the_number_of_a_class(wrong):
    """Anything else is refused, and would be another class's loss."""
    with pytest.raises(ValueError, match="no whole number from 0 to 2, as there are 3 classes"):
        L.sparse_categorical_crossentropy(np.array([0, 1, 2, wrong]), LOGITS, from_logits=True)


@pytest.mark.parametrize("loss", [L.binary_crossentropy, L.categorical_crossentropy])
@pytest.mark.parametrize("smoothing", [-0.1, 1.5, np.nan])
def test_smoothing_is_a_fraction(loss, smoothing):
    """Refused by its value."""
    with pytest.raises(ValueError, match=f"label_smoothing is {smoothing}"):
        loss(LABELS, SHARES, label_smoothing=smoothing)
