"""The FID Inception network: against numbers recorded from PyTorch at random weights, and its converter."""

from __future__ import annotations

import json

import chex
import inception_reference as reference
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
NARROW = 16


class InMemory:
    """A tensor of a checkpoint that is no file."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def numpy(self):
        return self.array


@pytest.fixture(scope="module")
def recorded():
    return np.load(GOLDEN / "inception.npz")


@pytest.fixture(scope="module")
def computed():
    """The features of the recorded images, by the network at its published size."""
    tensors = {name: InMemory(array) for name, array in reference.weights().items()}
    config = converter.make_config(Shapes({name: tensor.shape for name, tensor in tensors.items()}))
    params = jax.tree.map(jnp.asarray, converter.FORMAT.convert(config, tensors))
    images = inception.resize(jnp.asarray(reference.images()))
    return jax.jit(lambda p, x: Inception(config).apply({"params": p}, x))(params, images)


@pytest.mark.parametrize("name", inception.Features._fields)
def test_features_are_those_of_pytorch(computed, recorded, name):
    theirs = recorded[f"tf1/{name}"]
    assert difference(getattr(computed, name), theirs) < 5e-6 * np.abs(theirs).max()


def test_another_pooling_would_be_seen(computed, recorded):
    """The negative control: averages that count padding."""
    wrong = recorded["wrong pooling/pool"]
    assert difference(computed.pool, wrong) > 1e-2 * np.abs(wrong).max()


def test_the_published_sizes(computed):
    assert computed.pool.shape == (2, 2048) and computed.spatial.shape == (2, 2023)
    assert computed.logits.shape == computed.unbiased.shape == (2, 1008)
    config = InceptionConfig()
    assert (config.features, config.spatial) == (2048, 2023)
    stored = sum(leaf.size for leaf in jax.tree.leaves(inception.abstract_params(config)))
    assert stored == sum(int(np.prod(shape)) for shape in reference.shapes().values()) == 23_885_392


@pytest.mark.parametrize("how", inception.RESIZE)
def test_resizing_is_that_of_pytorch(recorded, how):
    ours = inception.resize(jnp.asarray(reference.images()), how)
    assert difference(ours[:, ::EVERY, ::EVERY], recorded[f"{how}/resized"]) < 1e-6
    other = inception.RESIZE[1 - inception.RESIZE.index(how)]
    assert difference(ours[:, ::EVERY, ::EVERY], recorded[f"{other}/resized"]) > 1e-2


def write(path, weights, old=True):
    tree = torch_writer.ordered_dict({name: torch_writer.tensor(array) for name, array in weights.items()})
    (torch_writer.write_old if old else torch_writer.write)(path, tree)
    return path


@pytest.mark.slow
def test_conversion(tmp_path, capsys):
    tensors = reference.weights(NARROW, classes=10)
    tracked = {"Mixed_5b.branch1x1.bn.num_batches_tracked": np.array(3)}
    write(tmp_path / "x.pth", tensors | tracked)
    assert main(["convert", str(tmp_path / "x.pth"), str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "inception" and told["config"] == {"divisor": 16, "classes": 10}
    loaded = weights.load(tmp_path / "out")
    chex.assert_trees_all_equal(loaded.params["fc"]["kernel"], tensors["fc.weight"].T)
    unit = loaded.params["Mixed_6d"]["branch7x7_2"]
    chex.assert_trees_all_equal(unit["bn"]["var"], tensors["Mixed_6d.branch7x7_2.bn.running_var"])
    chex.assert_trees_all_equal(
        unit["conv"]["kernel"], tensors["Mixed_6d.branch7x7_2.conv.weight"].transpose(2, 3, 1, 0)
    )
    source = open_source(write(tmp_path / "x.pth", tensors, old=False))
    same = convert(source, make_config(source))
    chex.assert_trees_all_equal(same, loaded.params)


@pytest.mark.parity
def test_live_against_pytorch(computed):
    pytest.importorskip("torch")
    x = reference.resized(reference.images(), "tf1")
    for name, theirs in reference.outputs(reference.weights(), x).items():
        assert difference(getattr(computed, name), theirs) < 5e-6 * np.abs(theirs).max()
