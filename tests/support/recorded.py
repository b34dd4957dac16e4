"""Files of recorded numbers, and the checkpoints that they were recorded with."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cspd_jax.converters._tables import Shapes
from cspd_jax.converters.source import Options, convert, make_config, open_source
from cspd_jax.networks.mar import MARModel

GOLDEN = Path(__file__).parents[1] / "golden"


class Recorded:
    """The arrays of a file."""

    def __init__(self, folder, name):
        self.folder = folder
        self.name = name
        self.arrays = np.load(folder / f"{name}.npz")

    def __getitem__(self, key):
        return self.arrays[key]

    def under(self, prefix):
        """The names directly below a prefix."""
        return sorted(
            {
                k[len(prefix) :].split("/")[0]
                for k in self.arrays.files
                if k.startswith(prefix)
            }
        )


class Network:
    """A recorded checkpoint: configuration and our parameters. `like`: one that has its
    number of heads, if nothing else tells."""

    def __init__(self, folder, name, like=None):
        source = open_source(folder / f"{name}.pth")
        keys = folder / f"{name}_keys.json"
        known = source.args
        if keys.exists():
            known = json.loads(keys.read_text())["config"]
        heads = tuple(known.get(f"{part}_num_heads") for part in ("encoder", "decoder"))
        if None in heads:
            heads = like and (like.config.encoder_heads, like.config.decoder_heads)
        options = Options(
            heads=heads,
            respacing=known.get("num_sampling_steps"),
            patch_size=known.get("patch_size"),
        )
        self.config = make_config(source, options)
        self.params = jax.tree.map(jnp.asarray, convert(source, self.config))
        self.model = MARModel(self.config)


@functools.cache
def network(folder, name, like=None):
    return Network(folder, name, like)


def check_published(file, converter, config, prefix=""):
    """Asserts that a file lists the names and shapes of a published configuration, and
    that the converter reads all of them. Returns what the file says."""
    told = json.loads(file.read_text())
    shapes = Shapes(
        {
            name.removeprefix(prefix): tuple(shape)
            for name, shape in dict(told["keys"]).items()
            if name.startswith(prefix)
        }
    )
    assert converter.make_config(shapes) == config
    plan = converter.FORMAT.plan(config, shapes)
    read = {entry.name: entry.source_shape for entry in plan}
    assert read == converter.FORMAT.parameters(shapes)
    return told


def difference(ours, theirs):
    ours = np.asarray(ours)
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(
        np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max(initial=0)
    )


def find(folder, *names):
    """The first of these files, in the folder or in the one that CSPD_GOLDEN names:
    some are too large to be stored beside the tests."""
    folders = folder, Path(os.environ.get("CSPD_GOLDEN", folder))
    files = [one / name for one in folders for name in names if (one / name).is_file()]
    if not files:
        pytest.skip(f"set CSPD_GOLDEN to a folder that holds {names[-1]}")
    return files[0]


def nhwc(x):
    return jnp.asarray(x).transpose(0, 2, 3, 1)


def check(cases):
    """Asserts that there are cases (what, difference, tolerance), and that none
    exceeds its tolerance."""
    cases = list(cases)
    assert cases
    bad = [
        f"{what}: {error:.2e} > {bound:.2e}"
        for what, error, bound in cases
        if not error <= bound
    ]
    assert not bad, "\n".join(bad)


def mismatch(ours, theirs):
    """`difference` for lists that may differ in length."""
    return difference(ours, theirs) if np.shape(ours) == np.shape(theirs) else np.inf
