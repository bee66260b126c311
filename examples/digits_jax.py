"""Handwritten digits with JAX: a small convolutional network, whose parameters and optimizer are on servers.

python examples/digits_jax.py                                      one process, and a server started for it
psworker --standalone --ps 2 --workers 2 examples/digits_jax.py    a whole cluster on this machine
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import psclient as ps
import psclient.jax as psj


def apply(params: Any, images: Any) -> Any:
    """Logits, (N, 10), of images, (N, 1, 8, 8)."""
    x = jax.lax.conv(images, params["conv"]["kernel"], (2, 2), "SAME") + params["conv"]["bias"]
    return jax.nn.relu(x).reshape(len(x), -1) @ params["dense"]["kernel"] + params["dense"]["bias"]


def mean_loss(params: Any, images: Any, labels: Any) -> Any:
    """The mean cross-entropy of a batch."""
    return -jnp.take_along_axis(jax.nn.log_softmax(apply(params, images)), labels[:, None], axis=1).mean()


def main(epochs: int, resume: bool) -> None:
    """Trains, tests, and saves a checkpoint of each epoch."""
    pixels, labels = (x[np.random.default_rng(0).permutation(1797)] for x in load_digits(return_X_y=True))
    images = (pixels / 16).reshape(-1, 1, 8, 8).astype("float32")
    init, keys = jax.nn.initializers.he_normal(in_axis=-2), jax.random.split(jax.random.key(0))
    params = {"conv": {"kernel": init(keys[0], (16, 1, 3, 3)), "bias": np.zeros((16, 1, 1), "float32")}}
    params["dense"] = {"kernel": init(keys[1], (256, 10)), "bias": np.zeros(10, "float32")}
    strategy = ps.ParameterServerStrategy(["cpu:0"])
    state = psj.TrainState.create(apply_fn=apply, params=params, tx=psj.optimizers.adam(0.005), strategy=strategy)
    checkpoint = ps.train.Checkpoint(params=state.variables, tx=state.tx)
    checkpoint.restore("digits_jax" if resume else None)
    gradients = jax.jit(jax.value_and_grad(mean_loss))
    batches = psj.Loader(ps.ArrayDataset((images[:1440], labels[:1440])).shuffle(0).batch(64), strategy=strategy)
    for epoch in batches.epochs(epochs):
        losses = []
        for batch in batches:
            loss, grads = gradients(state.params, *batch)
            state = state.apply_gradients(grads=grads)  # a round: the mean over all workers, a step on the servers
            losses.append(loss)
        checkpoint.save("digits_jax/ckpt")
        mean = float(strategy.reduce("mean", np.mean(losses), axis=None))
        accuracy = np.mean(apply(state.params, images[1440:]).argmax(axis=1) == labels[1440:])
        if strategy.is_main_process:  # one process of all
            print(f"epoch {epoch + 1}  step {state.step}  loss {mean:.4f}  test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a convolutional network on handwritten digits, with JAX.")
    parser.add_argument("--epochs", type=int, default=10, help="epochs in all, those before a resume included [10]")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    main(**vars(parser.parse_args()))
