"""The FID Inception network against numbers recorded from pytorch-fid at random
weights; its file is converted by test_evaluate.py."""

from unittest import mock

import inception_random
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recorded import GOLDEN, difference

from cspd_jax.converters import inception as converter
from cspd_jax.converters._tables import Shapes
from cspd_jax.networks import inception
from cspd_jax.networks.inception import Inception, InceptionConfig

EVERY = 7  # as in tests/golden/record_inception.py
RECORDED = np.load(GOLDEN / "inception.npz")


@pytest.mark.slow
def test_features_are_those_of_pytorch():
    tensors = inception_random.weights()
    shapes = {name: array.shape for name, array in tensors.items()}
    config = converter.make_config(Shapes(shapes))
    assert config == InceptionConfig()
    # Of the published file.
    assert sum(array.size for array in tensors.values()) == 23_885_392
    lazy = {
        name: mock.Mock(shape=array.shape, dtype=array.dtype, numpy=array.copy)
        for name, array in tensors.items()
    }
    params = jax.tree.map(jnp.asarray, converter.FORMAT.convert(config, lazy))
    images = inception.resize(jnp.asarray(inception_random.images()))
    found = jax.jit(Inception(config).apply)({"params": params}, images)
    for name, ours in found._asdict().items():
        theirs = RECORDED[name]
        assert difference(ours, theirs) < 5e-6 * np.abs(theirs).max(), name


@pytest.mark.parametrize("how", inception.RESIZE)
def test_resizing_is_that_of_pytorch(how):
    resized = inception.resize(jnp.asarray(inception_random.images()), how)
    ours = resized[:, ::EVERY, ::EVERY]
    other = inception.RESIZE[1 - inception.RESIZE.index(how)]
    assert difference(ours, RECORDED[f"resized/{how}"]) < 1e-6
    assert difference(ours, RECORDED[f"resized/{other}"]) > 1e-2
