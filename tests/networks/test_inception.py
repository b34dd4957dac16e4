"""The FID Inception network against numbers recorded from pytorch-fid at random
weights; its converter."""

import json
import types

import chex
import inception_random
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_writer
from recorded import GOLDEN, difference

from cspd_jax import weights
from cspd_jax.__main__ import main
from cspd_jax.converters import inception as converter
from cspd_jax.converters._tables import Shapes
from cspd_jax.converters.source import convert, make_config, open_source
from cspd_jax.networks import inception
from cspd_jax.networks.inception import Inception, InceptionConfig

EVERY = 7  # as in tests/golden/record_inception.py
RECORDED = np.load(GOLDEN / "inception.npz")


def test_features_are_those_of_pytorch():
    tensors = inception_random.weights()
    config = converter.make_config(
        Shapes({name: array.shape for name, array in tensors.items()})
    )
    assert config == InceptionConfig()
    # Of the published file.
    assert sum(array.size for array in tensors.values()) == 23_885_392
    lazy = {
        name: types.SimpleNamespace(
            shape=array.shape, dtype=array.dtype, numpy=array.copy
        )
        for name, array in tensors.items()
    }
    params = jax.tree.map(jnp.asarray, converter.FORMAT.convert(config, lazy))
    images = inception.resize(jnp.asarray(inception_random.images()))
    found = jax.jit(lambda p, x: Inception(config).apply({"params": p}, x))(
        params, images
    )
    for name, ours in found._asdict().items():
        assert difference(ours, RECORDED[name]) < 5e-6 * np.abs(RECORDED[name]).max(), (
            name
        )


@pytest.mark.parametrize("how", inception.RESIZE)
def test_resizing_is_that_of_pytorch(how):
    ours = inception.resize(jnp.asarray(inception_random.images()), how)[
        :, ::EVERY, ::EVERY
    ]
    other = inception.RESIZE[1 - inception.RESIZE.index(how)]
    assert difference(ours, RECORDED[f"resized/{how}"]) < 1e-6
    assert difference(ours, RECORDED[f"resized/{other}"]) > 1e-2


@pytest.mark.slow
def test_conversion(tmp_path, capsys):
    """Of both formats of PyTorch's files."""
    tensors = inception_random.weights(InceptionConfig(16, 10))
    tracked = {"Mixed_5b.branch1x1.bn.num_batches_tracked": np.array(3)}
    torch_writer.write_old(tmp_path / "x.pth", tensors | tracked)
    assert (
        main(["convert", str(tmp_path / "x.pth"), str(tmp_path / "out"), "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "inception" and told["config"] == {
        "divisor": 16,
        "classes": 10,
    }
    loaded = weights.load(tmp_path / "out").params
    chex.assert_trees_all_equal(loaded["fc"]["kernel"], tensors["fc.weight"].T)
    torch_writer.write(tmp_path / "x.pth", tensors)
    source = open_source(tmp_path / "x.pth")
    chex.assert_trees_all_equal(convert(source, make_config(source)), loaded)
