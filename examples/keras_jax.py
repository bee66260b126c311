"""Handwritten digits with Keras on JAX: the model's `stateless_call`, whose parameters and optimizer are on servers.

python examples/keras_jax.py                                      one process, and a server started for it
psworker --standalone --ps 2 --workers 2 examples/keras_jax.py    a whole cluster on this machine
"""

import argparse
import os
from collections import OrderedDict
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from digits import load_data

import psclient as ps
import psclient.jax as psj


def main(epochs: int, resume: bool) -> None:
    """Trains, tests, and saves a checkpoint of each epoch."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Reshape((8, 8, 1)), keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dropout(0.2), keras.layers.Dense(10)])
    model.build((None, 64))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)

    def mean_loss(params: Any, rest: Any, images: Any, targets: Any) -> Any:
        logits, rest = model.stateless_call(list(params.values()), rest, images, training=True)
        return loss(targets, logits), rest

    gradients = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
    strategy = ps.ParameterServerStrategy(["cpu:0"])
    params = OrderedDict((v.path, v.value) for v in model.trainable_variables)  # JAX sorts the keys of a plain dict
    state = psj.TrainState.create(apply_fn=None, params=params, tx=psj.optimizers.adam(0.005), strategy=strategy)
    checkpoint = ps.train.Checkpoint(state)
    checkpoint.restore("keras_jax" if resume else None)
    train, test = load_data()
    batches = psj.Loader(ps.ArrayDataset(train).shuffle(0).batch(64), strategy=strategy)
    rest = [v.value for v in model.non_trainable_variables]  # Dropout's seed: each worker's own
    for epoch in batches.epochs(epochs):
        for batch in batches:
            (value, rest), grads = gradients(state.params, rest, *batch)
            state = state.apply_gradients(grads=grads)  # a round: the mean over all workers, a step on the servers
        checkpoint.save("keras_jax/ckpt")
        for v, now in zip(model.trainable_variables, state.params.values(), strict=True):
            v.assign(now)  # so that Keras evaluates, and saves, what was trained
        accuracy = np.mean(np.argmax(model(test[0]), axis=1) == test[1].argmax(axis=1))
        if strategy.is_main_process:  # one process of all
            print(f"epoch {epoch + 1}  step {state.step}  loss {value:.4f}  test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a Keras model on handwritten digits, with JAX.")
    parser.add_argument("--epochs", type=int, default=10, help="epochs in all, those before a resume included [10]")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    main(**vars(parser.parse_args()))
