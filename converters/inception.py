"""The Inception network of FID: the names in the published PyTorch file, and the sizes read from shapes.

The file is called `pt_inception-2015-12-05-6726825d.pth` by pytorch-fid and
`weights-inception-2015-12-05-6726825d.pth` by torch-fidelity; both are the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from cspd_jax.converters._tables import (
    Entry,
    Put,
    Shape,
    Shapes,
    Table,
    Tensor,
    check_names_and_shapes,
    expected,
    fill,
)
from cspd_jax.errors import UserError, naming
from cspd_jax.networks.inception import InceptionConfig, abstract_params

# Of the published file. Its first eight digits are in the file's name.
PUBLISHED_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
_FIRST = 32  # channels of the published network's first layer
# How often a normalisation was trained; nothing depends on it, and not every file has it.
_IGNORED = re.compile(r"[\w.]+\.bn\.num_batches_tracked")

TABLE: Table = (
    (r"fc", r"fc"),
    (r"(.+)/bn/mean", r"\1.bn.running_mean"),
    (r"(.+)/bn/var", r"\1.bn.running_var"),
    (r"(.+)/(conv|bn)", r"\1.\2"),
)


def make_config(shapes: Mapping[str, Shape], where: str) -> InceptionConfig:
    """The configuration, from shapes."""
    s = Shapes(shapes, where)
    first = s.size("Conv2d_1a_3x3.conv.weight", 0, 4)
    if _FIRST % first:
        raise UserError(
            f"{where} does not fit the network: the first layer of the Inception network of FID has {_FIRST}"
            f" channels, and not {first}"
        )
    with naming(where):
        return InceptionConfig(_FIRST // first, s.size("fc.weight", 0, 2))


def wanted(config: InceptionConfig, where: str = "the configuration") -> list[Entry]:
    """Every tensor that a checkpoint of these sizes holds."""
    return expected(TABLE, abstract_params, config, where)


def plan(config: InceptionConfig, shapes: Mapping[str, Shape], where: str) -> list[Entry]:
    """Which tensor goes where; UserError unless names and shapes fit exactly."""
    entries = wanted(config, where)
    counted = {name: shape for name, shape in shapes.items() if not _IGNORED.fullmatch(name)}
    check_names_and_shapes(entries, counted, where)
    return entries


def convert(
    config: InceptionConfig,
    tensors: Mapping[str, Tensor],
    where: str,
    dtype=np.float32,
    put: Put | None = None,
) -> dict:
    """The Flax parameters as numpy arrays, or what `put` makes of them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return fill(plan(config, shapes, where), tensors, where, dtype, put)
